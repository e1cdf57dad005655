"""Rollouts: completions, and which weights made which of their tokens."""

import itertools
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, WithJsonSchema, model_validator

from rollout_service.protocol.base import MAX_VERSION, Frozen, WeightVersion
from rollout_service.protocol.routed_experts import Experts, Known, RoutedExperts

FinishReason = Literal["stop", "length", "abort"]
OnAbort = Literal["continue", "return"]


_NUMBER_OR_TEXT = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_VERSION}, {"type": "string"}]}


class Span(Frozen):
    """Output tokens ``[start, end)`` of one completion were sampled by the weights of ``version`` on one replica."""

    version: Annotated[WeightVersion, WithJsonSchema(_NUMBER_OR_TEXT, mode="serialization")]
    """Replies to generations write it as text, as vLLM does; everything else as a number. Both are read."""
    start: int = Field(ge=0)
    end: int
    replica_id: str | None = None
    """The replica that sampled them; None: the rollout's."""
    label: str | None = None
    """What the trainer calls that version, if it was pushed with a label."""

    @model_validator(mode="after")
    def _not_empty(self) -> "Span":
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty")
        return self

    def moved(self, by: int) -> "Span":
        """The span with ``by`` tokens before it."""
        return self.model_copy(update={"start": self.start + by, "end": self.end + by})

    def is_continued_by(self, span: "Span") -> bool:
        """Whether both are of one version, under one label, on one replica.

        A number alone does not tell weights apart: a log that was set back gives it again, under another label.
        """
        return (self.version, self.label, self.replica_id) == (span.version, span.label, span.replica_id)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans of one completion, in their order, with one in place of neighbours of which one continues the other."""
    made: list[Span] = []
    for span in spans:
        if made and made[-1].is_continued_by(span):
            made[-1] = made[-1].model_copy(update={"end": span.end})
        else:
            made.append(span)
    return tuple(made)


class Candidate(NamedTuple):
    """A token that might stand at a position."""

    token_id: int
    logprob: float
    """Natural log of its probability."""
    rank: int
    """1: no token is likelier."""


class Completion(Frozen):
    """One sampled continuation of a prompt.

    ``logprobs[i]`` is the natural log-probability of ``token_ids[i]`` under the distribution it was sampled from
    (vLLM's ``processed_logprobs``: after temperature, penalties and truncation). Always finite.
    """

    index: int = Field(ge=0)
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    spans: tuple[Span, ...]
    text: str | None = None
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    """For each token the ``sampling.logprobs`` likeliest ones, likeliest first; fewer where fewer could be drawn. None
    if none were asked for."""
    prompt_logprobs: tuple[tuple[Candidate, ...] | None, ...] | None = None
    """For each token of the prompt itself, then the ``sampling.prompt_logprobs`` likeliest ones, likeliest first, by
    the model at temperature 1. None for the first token, and if they were not asked for."""
    packed_sampling_mask: tuple[str, ...] | None = None
    """Which tokens each token was drawn from, in the chunks of ``rollout_service.protocol.sampling_mask``; None unless
    ``engine.return_sampling_mask`` is set."""
    routed_experts: RoutedExperts | None = None
    """Which experts its tokens went to, with ``return_routed_experts``; ``Rollout.routed_experts`` unpacks them."""

    @model_validator(mode="after")
    def _aligned(self) -> "Completion":
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        if self.top_logprobs is not None and len(self.top_logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.top_logprobs)} lists of the likeliest")
        position = 0
        for span in self.spans:
            if span.start != position:
                raise ValueError(f"spans {self.spans} leave a gap at token {position}")
            position = span.end
        if position != len(self.token_ids):
            raise ValueError(f"spans {self.spans} do not cover {len(self.token_ids)} tokens")
        return self

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that made this completion, in the order they were live."""
        return tuple(version for version, _ in itertools.groupby(span.version for span in self.spans))


class Rollout(Frozen):
    """One prompt's ``n`` completions. Which replica made which token stands in their spans."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    replica_id: str
    """The replica that ended the most interrupted completion: of a rollout that was not interrupted, the only one."""
    attempts: int = Field(default=1, ge=1)
    """How many replicas' generations the most interrupted completion took; 1: nothing was in its way."""
    returned: bool = False
    """A pause that returns what it aborts came while this was made: nobody goes on with what is aborted of it."""
    truncated_sampling: bool = False
    """Sampled from a part of the vocabulary (``top_p``, ``top_k``, ``min_p``, ``min_tokens``), over which the logprobs
    are renormalized: they do not compare with those of the whole vocabulary, and the monitor does not judge them."""

    def routed_experts(self, index: int = 0) -> tuple[Experts, Known]:
        """Which experts each token of the prompt and of completion ``index`` went to.

        Returns [tokens, layers, topk], uint8 or uint16, and bool [tokens]: which of them are known. Never known are the
        last token, which no engine has read, and those before ``routed_experts_prompt_start``.

        Raises ValueError if they were not asked for, or the completion has no token.
        """
        completion = self.completions[index]
        if completion.routed_experts is None:
            raise ValueError(
                f"completion {index} of {self.request_id} came without its experts: ask for return_routed_experts=True "
                "(a completion that was cut off before its first token has none)"
            )
        return completion.routed_experts.unpacked(len(self.prompt_token_ids) + len(completion.token_ids))
