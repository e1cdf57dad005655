"""Truncated sampling: the trainer's logprobs, renormalized over the tokens that the engine's sampling kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling_mask import unpack


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The tokens from which each token of a batch of completions was sampled; K is the largest number of them.

    Engines with ``engine.return_sampling_mask`` return them. Their logprobs are renormalized over these tokens.
    ``renormalized`` does the same to the trainer's, so that ``correct`` compares the same distributions.
    """

    token_ids: torch.Tensor
    """int64 [batch, tokens, K], 0 where ``kept`` is False."""
    kept: torch.Tensor
    """bool [batch, tokens, K]; all False at padding."""

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        num_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> "SamplingSupport":
        """Unpack each completion's ``packed_sampling_mask``, padded at the end to ``num_tokens``; None: the longest.

        Raises ValueError if a completion has a mask of another length than its tokens, if it is longer than
        ``num_tokens``, and for an invalid packed mask.
        """
        rows = [unpack(completion.packed_sampling_mask or ()) for completion in completions]
        for row, ((counts, _), completion) in enumerate(zip(rows, completions, strict=True)):
            if len(counts) != len(completion.token_ids):
                raise ValueError(
                    f"completion {row} has {len(completion.token_ids)} tokens and sampling masks of {len(counts)}: "
                    "engines return them if the deployment sets engine.return_sampling_mask"
                )
        longest = max((len(counts) for counts, _ in rows), default=0)
        width = longest if num_tokens is None else num_tokens
        if longest > width:
            raise ValueError(f"a completion has {longest} tokens, more than num_tokens={width}")
        max_kept = max((int(counts.max(initial=0)) for counts, _ in rows), default=0)
        kept = np.zeros((len(rows), width, max_kept), bool)
        token_ids = np.zeros(kept.shape, np.int64)
        for row, (counts, ids) in enumerate(rows):
            kept[row, : len(counts)] = np.arange(max_kept) < counts[:, None]
            token_ids[row][kept[row]] = ids
        return cls(torch.from_numpy(token_ids).to(device), torch.from_numpy(kept).to(device))

    def renormalized(self, logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Return logprobs [batch, tokens] of the sampled tokens among the kept ones; differentiable, at least fp32.

        ``logits`` [batch, tokens, vocabulary] are the trainer's at the sampling temperature, normalized or not;
        ``sampled`` int64 [batch, tokens]. 0 at padding, whatever its values. Only the kept columns are read. Raises
        ValueError for shapes that do not match and for a sampled token that was not kept, with its position.
        """
        if logits.dim() != 3 or logits.shape[:2] != self.kept.shape[:2]:
            raise ValueError(
                f"logits {list(logits.shape)} must be [batch, tokens, vocabulary] with [batch, tokens] "
                f"{list(self.kept.shape[:2])} of the sampling masks"
            )
        return self.renormalized_at(logits.gather(-1, self.token_ids), sampled)

    def renormalized_at(self, at_kept: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Do the same with the trainer's logits or logprobs at ``token_ids`` alone, [batch, tokens, K].

        For trainers whose loss never holds the whole vocabulary at once. Values where ``kept`` is False have no
        influence. Raises the errors of ``renormalized``.
        """
        if at_kept.shape != self.kept.shape or sampled.shape != self.kept.shape[:2]:
            raise ValueError(
                f"at_kept {list(at_kept.shape)} must have the shape {list(self.kept.shape)} of token_ids, and sampled "
                f"{list(sampled.shape)} its first two"
            )
        has_support = self.kept.any(-1)
        chosen = (self.token_ids == sampled[..., None]) & self.kept
        self._require_kept(has_support & ~chosen.any(-1), sampled)
        values = at_kept.to(torch.promote_types(at_kept.dtype, torch.float32))
        # equal values at padding: a logsumexp over no values would make the gradient NaN
        values = values.masked_fill(~self.kept, -torch.inf).masked_fill(~has_support[..., None], 0.0)
        own = values.masked_fill(~chosen, 0.0).sum(-1)
        return (own - values.logsumexp(-1)).masked_fill(~has_support, 0.0)

    def _require_kept(self, outside: torch.Tensor, sampled: torch.Tensor) -> None:
        if bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(
                f"sampled[{row}, {column}] is token {int(sampled[row, column])}, which its sampling mask does not hold "
                f"({int(outside.sum())} such tokens): are masks and tokens of the same completions?"
            )
