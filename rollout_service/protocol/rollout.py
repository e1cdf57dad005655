"""Rollouts: completions, with the weight versions that sampled their tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, WithJsonSchema, model_validator

from rollout_service.protocol.base import MAX_VERSION, Frozen, WeightVersion
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.routed_experts import Experts, Known, RoutedExperts

FinishReason = Literal["stop", "length", "abort"]
OnAbort = Literal["continue", "return"]


_NUMBER_OR_TEXT = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_VERSION}, {"type": "string"}]}


class Span(Frozen):
    """Output tokens ``[start, end)`` of one completion, sampled by the weights of ``version`` on one replica."""

    version: Annotated[WeightVersion, WithJsonSchema(_NUMBER_OR_TEXT, mode="serialization")]
    """Replies to generations write the version as text, like vLLM; all other messages as a number. Both are accepted.
    """
    start: int = Field(ge=0)
    end: int
    replica_id: str | None = Field(default=None, max_length=256)
    """The replica that sampled them; None: the rollout's."""
    label: str | None = Field(default=None, max_length=256)
    """The trainer's label of that version, if it was pushed with one."""
    kv_from: Annotated[WeightVersion | None, WithJsonSchema(_NUMBER_OR_TEXT, mode="serialization")] = None
    """A bound with ``weights.kv_cache_on_update: keep``: the tokens read no keys and values of older versions. None:
    all are of ``version``. Written like ``version``, and left out if None."""
    adapter: str | None = Field(default=None, max_length=256)
    """The adapter that sampled them, beside the weights of ``version``; None: none."""
    adapter_version: int | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> "Span":
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty")
        return self

    @property
    def oldest_kv(self) -> int:
        """Return ``kv_from``, or the version without it."""
        return self.version if self.kv_from is None else self.kv_from

    def shift(self, by: int) -> "Span":
        """Return the span shifted by ``by`` tokens."""
        return self.model_copy(update={"start": self.start + by, "end": self.end + by})

    def is_continued_by(self, span: "Span") -> bool:
        """Return True if both spans have the same version, label, replica, ``kv_from`` and adapter.

        The number alone does not identify weights: a log that was set back may give it again, under another label.
        """
        mine = self.version, self.label, self.replica_id, self.kv_from, self.adapter, self.adapter_version
        others = span.version, span.label, span.replica_id, span.kv_from, span.adapter, span.adapter_version
        return mine == others


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge adjacent spans of one completion that have the same version, label, replica, ``kv_from`` and
    adapter."""
    made: list[Span] = []
    for span in spans:
        if made and made[-1].is_continued_by(span):
            made[-1] = made[-1].model_copy(update={"end": span.end})
        else:
            made.append(span)
    return tuple(made)


class Candidate(NamedTuple):
    """A candidate token at a position."""

    token_id: int
    logprob: float
    """Natural log of its probability."""
    rank: int
    """Rank by probability; 1 is the most likely token."""


class PromptCandidates(Sequence[tuple[Candidate, ...] | None]):
    """Candidates of the tokens of a prompt, in arrays: collecting garbage takes microseconds for each tuple kept."""

    def __init__(
        self, ends: npt.ArrayLike, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike
    ) -> None:
        """Create the sequence. Token ``i`` has the entries ``ends[i - 1]`` to ``ends[i]``; the first has none."""
        self._ends = np.asarray(ends)
        self._columns = np.asarray(token_ids), np.asarray(logprobs), np.asarray(ranks)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[Candidate, ...] | None]:
        every = map(Candidate, *(column.tolist() for column in self._columns))
        yield None
        for start, end in itertools.pairwise(self._ends.tolist()):
            yield tuple(itertools.islice(every, end - start))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


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
    """The ``sampling.logprobs`` most likely tokens at each position, most likely first; fewer where truncation left
    fewer. None if not requested."""
    prompt_logprobs: tuple[tuple[Candidate, ...] | None, ...] | None = None
    """For each token of the prompt, its own logprob, then the ``sampling.prompt_logprobs`` most likely tokens, at
    temperature 1. None for the first token, and if not requested."""
    scores: CompactLogprobs | None = None
    """Logprobs of the prompt's tokens, if the call has ``scoring``."""
    packed_sampling_mask: tuple[str, ...] | None = None
    """The tokens from which each token was drawn, as chunks of ``rollout_service.protocol.sampling_mask``. None unless
    ``engine.return_sampling_mask`` is set."""
    routed_experts: RoutedExperts | None = None
    """The experts of its tokens, with ``return_routed_experts``; ``Rollout.routed_experts`` unpacks them."""

    @model_validator(mode="after")
    def _aligned(self) -> "Completion":
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        if self.top_logprobs is not None and len(self.top_logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.top_logprobs)} lists of top logprobs")
        position = 0
        for span in self.spans:
            if span.start != position:
                raise ValueError(f"spans {self.spans} leave a gap at token {position}")
            position = span.end
        if position != len(self.token_ids):
            raise ValueError(f"spans {self.spans} do not cover {len(self.token_ids)} tokens")
        return self

    def with_adapter(self, name: str, version: int) -> "Completion":
        """Return the completion with the adapter in its spans."""
        told = {"adapter": name, "adapter_version": version}
        return self.model_copy(update={"spans": tuple(span.model_copy(update=told) for span in self.spans)})

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the weight versions that sampled this completion, in their order in time."""
        return tuple(version for version, _ in itertools.groupby(span.version for span in self.spans))


class Rollout(Frozen):
    """The ``n`` completions of one prompt. Their spans name the replica of each token."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    replica_id: str
    """The replica that ended the completion with the most interruptions; without interruptions, the only replica."""
    attempts: int = Field(default=1, ge=1)
    """Number of generations that the completion with the most interruptions took; 1: no interruption."""
    returned: bool = False
    """True if a pause with ``on_abort="return"`` aborted it: an aborted completion is then not continued."""
    cached_tokens: int = Field(default=0, ge=0)
    """Number of the prompt's tokens that the first replica's prefix cache had; 0 also if that replica was lost."""
    truncated_sampling: bool = False
    """True if tokens were sampled from a part of the vocabulary (``top_p``, ``top_k``, ``min_p``, ``min_tokens``,
    ``structured_outputs``), or with ``logit_bias``. Their logprobs are renormalized and not comparable with the whole
    vocabulary's. The monitor does not judge them."""

    def routed_experts(self, index: int = 0) -> tuple[Experts, Known]:
        """Return the experts of each token of the prompt and of completion ``index``.

        Return [tokens, layers, topk], uint8 or uint16, and a mask of known tokens, bool [tokens]. Never known are the
        last token, which no engine has read, and tokens before ``routed_experts_prompt_start``.

        Raises ValueError if they were not requested, or the completion has no token.
        """
        completion = self.completions[index]
        if completion.routed_experts is None:
            raise ValueError(
                f"completion {index} of {self.request_id} came without its experts: ask for return_routed_experts=True "
                "(a completion that was cut off before its first token has none)"
            )
        return completion.routed_experts.unpacked(len(self.prompt_token_ids) + len(completion.token_ids))
