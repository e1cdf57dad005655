"""Unfinished rollouts that a later call can continue."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Completion, Rollout


class PartialRollout(Frozen):
    """One prompt with its completions so far. ``generate_batch`` accepts it in place of a prompt.

    It is plain data. Use ``model_dump_json`` and ``model_validate_json`` to keep it across a restart of the trainer.
    """

    request_id: str
    prompt: str | None = None
    """The prompt text. None: the prompt was token ids."""
    prompt_token_ids: tuple[int, ...] | None
    """The prompt's token ids. None: the service has not tokenized the text yet."""
    completions: tuple[Completion, ...] = ()
    """The completions so far; empty if there are none. Those with ``finish_reason`` "abort" continue, the others have
    ended and stay unchanged. Their spans name the weight version of each token."""
    attempts: int = 0
    """Number of generations of the most interrupted completion, including an unfinished one."""
    truncated_sampling: bool = False
    """See ``Rollout.truncated_sampling``; it describes the tokens so far."""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> "PartialRollout":
        if self.prompt_token_ids is None and (self.prompt is None or self.completions):
            raise ValueError("prompt_token_ids are missing: only a text prompt without tokens may leave them out")
        return self

    @classmethod
    def of(cls, rollout: Rollout, prompt: str | None = None) -> "PartialRollout":
        """Return a partial rollout from a rollout with "abort" completions (``on_abort="return"``, or attempts
        exhausted).

        ``prompt``: the prompt text, if text was sent.
        """
        return cls(
            request_id=rollout.request_id,
            prompt=prompt,
            prompt_token_ids=rollout.prompt_token_ids,
            completions=rollout.completions,
            attempts=rollout.attempts,
            truncated_sampling=rollout.truncated_sampling,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, in all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)


class PartialBatch(NamedTuple):
    """The result of ``generate_batch(prompts, until=K)``. Both fields are keyed by the index in ``prompts``,
    ascending."""

    rollouts: dict[int, Rollout]
    """The first K complete groups: every completion has ended by itself."""
    partial: dict[int, PartialRollout]
    """The other groups. Pass them to the next call, together with new prompts."""


class BatchFailed(Exception):
    """Raised when some prompts of ``generate_batch`` failed. It holds all completions generated so far.

    The exception is also an instance of its first error's class, so that ``except ContextTooLong`` works.
    """

    rollouts: dict[int, Rollout]
    """The complete rollouts, by index in ``prompts``."""
    partial: dict[int, PartialRollout]
    """With ``until``: the groups that can be continued, as in ``PartialBatch``."""
    errors: dict[int, Exception]
    """The error of each failed prompt. A prompt in none of the three fields was cancelled or never started."""
    num_prompts: int

    @classmethod
    def of(
        cls,
        rollouts: Mapping[int, Rollout],
        partial: Mapping[int, PartialRollout],
        errors: Mapping[int, Exception],
        num_prompts: int,
    ) -> "BatchFailed":
        """Create the exception; ``errors`` holds at least one error, in order of occurrence."""
        first = next(iter(errors.values()))
        of_both: type[BatchFailed] = type(cls.__name__, (cls, type(first)), {"__module__": cls.__module__})
        made = of_both.__new__(of_both)
        vars(made).update(vars(first))  # attributes of the first error's class, such as ``detail``
        made.rollouts, made.partial, made.errors = dict(rollouts), dict(partial), dict(errors)
        made.num_prompts = num_prompts
        return made

    def __str__(self) -> str:
        index, first = next(iter(self.errors.items()))
        others = sorted(self.errors.keys() - {index})
        also = f"; {len(others)} more prompts failed, see .errors" if others else ""
        return (
            f"prompt {index} of {self.num_prompts}, counted from 0: {first}{also}; the {len(self.rollouts)} rollouts "
            "that are complete are in .rollouts"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return BatchFailed.of, (self.rollouts, self.partial, self.errors, self.num_prompts)
