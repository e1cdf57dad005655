"""Penalties for a continued completion, whose first tokens are part of its prompt.

vLLM's presence and frequency penalties count only the tokens that a request generates. A continued request therefore
disables them, and this logits processor applies them with the counts of the whole completion. The repetition penalty
counts the prompt, too, and would be correct. It is applied here as well, because it must precede the other two.

The class implements vLLM's public logits-processor interfaces of both model runners. Only continued requests with
penalties cost anything.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ForModelRunnerV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ForModelRunnerV2

from rollout_service.protocol.sampling import Sampling

_KEY = "rollout_service_partial_penalties"
"""Key in vLLM's ``SamplingParams.extra_args``."""


@dataclass(frozen=True)
class Penalties:
    """Penalties of a continued request."""

    partial_tokens: int
    """Number of tokens at the prompt's end that belong to the completion."""
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams) -> "Penalties | None":
        """Return the penalties in ``extra_args``. None: vLLM's own penalties apply."""
        asked = (params.extra_args or {}).get(_KEY)
        return None if asked is None else cls(**asked)


def with_partial_penalties(sampling: Sampling, partial_tokens: int) -> Mapping[str, object]:
    """Return the vLLM parameters that replace its own penalties. Empty if its own are correct."""
    if partial_tokens == 0 or (sampling.presence_penalty == 0 and sampling.frequency_penalty == 0):
        return {}
    asked = {
        "partial_tokens": partial_tokens,
        "repetition": sampling.repetition_penalty,
        "frequency": sampling.frequency_penalty,
        "presence": sampling.presence_penalty,
    }
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    return {**neutral, "extra_args": {_KEY: asked}}


@dataclass
class _Request:
    """State of a continued request in model runner V1."""

    penalties: Penalties
    output: list[int]
    """vLLM's own list of output tokens, which grows."""
    seen: torch.Tensor
    """bool [vocabulary]: tokens in prompt and completion."""
    counts: torch.Tensor
    """int32 [vocabulary]: counts in the completion."""
    counted: int = 0
    """Number of tokens of ``output`` already counted."""

    def count(self, tokens: list[int]) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.counts.device)
        self.counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.seen[ids] = True

    def catch_up(self) -> None:
        """Count the tokens sampled since the last call."""
        new = list(itertools.takewhile(lambda token: token >= 0, self.output[self.counted :]))  # -1: not available yet
        if new:
            self.count(new)
            self.counted += len(new)


def apply_penalties(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, asked: list[Penalties]
) -> torch.Tensor:
    """Return logits, fp32 [rows, vocabulary], with penalties as in vLLM.

    ``seen``: bool, tokens in prompt and completion. ``counts``: int32, counts in the completion. Both are [rows,
    vocabulary].
    """
    repetition, frequency, presence = torch.tensor(
        [(each.repetition, each.frequency, each.presence) for each in asked], dtype=torch.float32, device=logits.device
    ).T.unsqueeze(2)
    repeated = torch.where(seen, repetition, 1.0)
    logits = logits * torch.where(logits > 0, 1.0 / repeated, repeated)
    logits -= frequency * counts
    logits -= presence * (counts > 0)
    return logits


class PartialPenalties(ForModelRunnerV1, ForModelRunnerV2):
    """The logits processor of one worker. The constructor's arguments tell the model runner's version."""

    def __init__(self, vllm_config: VllmConfig, where: Any, is_pin_memory: bool = False) -> None:
        """Create the processor. ``where``: a device (V1), or the runner's ``LogitsProcRequestState`` (V2)."""
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._where = where
        self._requests: dict[int, _Request] = {}
        """Requests of model runner V1, by row."""
        self._slots: dict[int, Penalties] = {}
        """Penalties of requests of model runner V2, by slot."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Do nothing: ``with_partial_penalties`` sets valid parameters."""

    def is_argmax_invariant(self) -> bool:
        """Return False, for model runner V1: penalties can change the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the requests of model runner V1."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._requests.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self._requests.pop(row, None)
            if (penalties := Penalties.of(params)) is not None:
                self._requests[row] = self._request(penalties, prompt or [], output)
        for one, other, direction in batch_update.moved:
            moved, stayed = self._requests.pop(one, None), self._requests.pop(other, None)
            if moved is not None:
                self._requests[other] = moved
            if stayed is not None and direction is MoveDirectionality.SWAP:
                self._requests[one] = stayed

    def _request(self, penalties: Penalties, prompt: list[int], output: list[int]) -> _Request:
        seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._where)
        seen[torch.tensor(prompt, dtype=torch.int64, device=self._where)] = True
        counts = torch.zeros(self._vocabulary, dtype=torch.int32, device=self._where)
        request = _Request(penalties, output, seen, counts)
        request.count(prompt[len(prompt) - penalties.partial_tokens :])
        return request

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Assign a slot to a request of model runner V2."""
        self._slots.pop(req_idx, None)
        penalties = Penalties.of(sampling_params)
        if penalties is not None:
            self._slots[req_idx] = penalties
        return penalties is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Apply the penalties in place to logits, fp32 [rows, vocabulary]."""
        if ctx is not None:
            self._apply_v2(logits, ctx)
            return logits
        for row, request in self._requests.items():
            request.catch_up()
            whole = slice(row, row + 1)
            logits[whole, : self._vocabulary] = apply_penalties(
                logits[whole, : self._vocabulary],
                request.seen.unsqueeze(0),
                request.counts.unsqueeze(0),
                [request.penalties],
            )
        return logits

    def _apply_v2(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Apply the penalties of model runner V2. Without speculation, each row is a request."""
        slots_of_rows = ctx.idx_mapping_np.tolist()
        rows = [row for row, slot in enumerate(slots_of_rows) if slot in self._slots]
        if not rows:
            return
        device = logits.device
        asked = [self._slots[slots_of_rows[row]] for row in rows]
        longest = int(np.max(ctx.seq_lens_upper_bound_np[rows]))
        at = torch.tensor(rows, device=device)
        slots = ctx.idx_mapping[at].long()
        tokens = self._where.all_token_ids.gpu[slots, :longest].long()
        position = torch.arange(longest, device=device)
        there = position <= ctx.pos[at].unsqueeze(1)
        partial = torch.tensor([each.partial_tokens for each in asked], device=device)
        first = self._where.prompt_len.gpu[slots] - partial
        made = there & (position >= first.unsqueeze(1))
        tokens.masked_fill_(~there, 0)  # values beyond the sequence may be invalid tokens
        shape = len(rows), logits.shape[1]
        seen = torch.zeros(shape, dtype=torch.int32, device=device).scatter_add_(1, tokens, there.int())
        counts = torch.zeros(shape, dtype=torch.int32, device=device).scatter_add_(1, tokens, made.int())
        logits[at] = apply_penalties(logits[at], seen > 0, counts, asked)
