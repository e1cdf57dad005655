"""Rollouts that are not complete, which a later call carries on."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Completion, Rollout


class PartialRollout(Frozen):
    """One prompt, and what was made of its completions: ``generate_batch`` takes it in place of a prompt.

    Plain data: ``model_dump_json`` and ``model_validate_json`` bring it over a restart of the trainer.
    """

    request_id: str
    prompt: str | None = None
    """The text that was sent; None: token ids were."""
    prompt_token_ids: tuple[int, ...] | None
    """None: the service had not said yet which tokens the text has."""
    completions: tuple[Completion, ...] = ()
    """Those with the ``finish_reason`` "abort" go on; the others have ended, and stay as they are. Their spans say
    which weights made which token. Empty: nothing was made."""
    attempts: int = 0
    """Generations that its most interrupted completion took, that which was ended included."""
    truncated_sampling: bool = False
    """As in ``Rollout``, of what was made."""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> "PartialRollout":
        if self.prompt_token_ids is None and (self.prompt is None or self.completions):
            raise ValueError("prompt_token_ids are missing: a prompt in text has none only before anything was made")
        return self

    @classmethod
    def of(cls, rollout: Rollout, prompt: str | None = None) -> "PartialRollout":
        """A rollout with completions that came back as "abort" (``on_abort="return"``, or attempts were used up).

        ``prompt``: its text, if that is what was sent.
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
        """Made so far, of all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)


class PartialBatch(NamedTuple):
    """What ``generate_batch(prompts, until=K)`` returns. Both are keyed by the place in ``prompts``, in that order."""

    rollouts: dict[int, Rollout]
    """The first K groups that were complete: each completion has ended by itself."""
    partial: dict[int, PartialRollout]
    """The rest, to be carried on: pass them, and new prompts, to the next call."""


class BatchFailed(Exception):
    """Some prompts of ``generate_batch`` failed. Nothing that was made is lost.

    The exception is also of the class of its first error: ``except ContextTooLong`` holds as well.
    """

    rollouts: dict[int, Rollout]
    """The rollouts that are complete, by the prompt's index in ``prompts``."""
    partial: dict[int, PartialRollout]
    """With ``until``: the groups that can be carried on, as in ``PartialBatch``."""
    errors: dict[int, Exception]
    """Why each of the other prompts failed. A prompt in none of the three was not begun, or was cancelled."""
    num_prompts: int

    @classmethod
    def of(
        cls,
        rollouts: Mapping[int, Rollout],
        partial: Mapping[int, PartialRollout],
        errors: Mapping[int, Exception],
        num_prompts: int,
    ) -> "BatchFailed":
        """Make the exception; ``errors`` has at least one, the first that happened first."""
        first = next(iter(errors.values()))
        of_both: type[BatchFailed] = type(cls.__name__, (cls, type(first)), {"__module__": cls.__module__})
        made = of_both.__new__(of_both)
        vars(made).update(vars(first))  # what its class has, such as ``detail``
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
