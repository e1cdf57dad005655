"""Penalties of a completion whose first tokens are part of its prompt, since it was cut short and goes on.

vLLM's presence and frequency penalties count what a request has made itself. Those of a request that goes on are
therefore neutral, and applied here, with the counts of all of the completion's tokens. The repetition penalty counts
the prompt's tokens as well and would be right by itself, but comes before the two others, so it is applied here, too.

A logits processor of vLLM's public interfaces, of which its two model runners have one each. Only requests that go on
with penalties cost anything.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ForModelRunnerV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ForModelRunnerV2

from rollout_service.protocol.sampling import Sampling

_KEY = "rollout_service_partial_penalties"
"""In vLLM's ``SamplingParams.extra_args``."""


@dataclass(frozen=True)
class Penalties:
    """Of a request that goes on."""

    partial_tokens: int
    """So many tokens at the prompt's end are the completion's."""
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams) -> "Penalties | None":
        """As ``extra_args`` has them; None: vLLM's own are right."""
        asked = (params.extra_args or {}).get(_KEY)
        return None if asked is None else cls(**asked)


def with_partial_penalties(sampling: Sampling, partial_tokens: int) -> Mapping[str, object]:
    """Parameters of vLLM that take the place of its own penalties; none where those are right."""
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
    """What model runner V1 tells of a request that goes on."""

    penalties: Penalties
    output: list[int]
    """vLLM's own list, which grows."""
    seen: torch.Tensor
    """bool [vocabulary]: tokens of prompt and completion."""
    counts: torch.Tensor
    """int32 [vocabulary]: how often each is in the completion."""
    counted: int = 0
    """Tokens of ``output`` that are among them."""

    def count(self, tokens: list[int]) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.counts.device)
        self.counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.seen[ids] = True

    def catch_up(self) -> None:
        """Count what was sampled since."""
        new = list(itertools.takewhile(lambda token: token >= 0, self.output[self.counted :]))  # -1: not here yet
        if new:
            self.count(new)
            self.counted += len(new)


@dataclass
class _Slots:
    """What model runner V2 tells of requests that go on, by their slot."""

    states: LogitsProcRequestState
    penalties: dict[int, Penalties] = field(default_factory=dict)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Without speculation, a row is a request."""
        slots_of_rows = ctx.idx_mapping_np.tolist()
        rows = [row for row, slot in enumerate(slots_of_rows) if slot in self.penalties]
        if not rows:
            return
        device = logits.device
        asked = [self.penalties[slots_of_rows[row]] for row in rows]
        longest = int(np.max(ctx.seq_lens_upper_bound_np[rows]))
        at = torch.tensor(rows, device=device)
        slots = ctx.idx_mapping[at].long()
        tokens = self.states.all_token_ids.gpu[slots, :longest].long()
        position = torch.arange(longest, device=device)
        there = position <= ctx.pos[at].unsqueeze(1)
        partial = torch.tensor([each.partial_tokens for each in asked], device=device)
        first = self.states.prompt_len.gpu[slots] - partial
        made = there & (position >= first.unsqueeze(1))
        tokens.masked_fill_(~there, 0)  # whatever stands there may be no token
        shape = len(rows), logits.shape[1]
        seen = torch.zeros(shape, dtype=torch.int32, device=device).scatter_add_(1, tokens, there.int())
        counts = torch.zeros(shape, dtype=torch.int32, device=device).scatter_add_(1, tokens, made.int())
        logits[at] = penalized(logits[at], seen > 0, counts, asked)


def penalized(logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, asked: list[Penalties]) -> torch.Tensor:
    """fp32 [rows, vocabulary], as vLLM's own penalties make them.

    ``seen``: bool, tokens of prompt and completion; ``counts``: int32, how often each is in the completion; both
    [rows, vocabulary].
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
    """Of one worker. Which interface is called, each runner says by what it gives the constructor."""

    def __init__(self, vllm_config: VllmConfig, where: Any, is_pin_memory: bool = False) -> None:
        """``where``: a device (V1), or the runner's ``LogitsProcRequestState`` (V2)."""
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._slots = _Slots(where) if isinstance(where, LogitsProcRequestState) else None
        self._device = None if self._slots else where
        self._requests: dict[int, _Request] = {}
        """By their row, of model runner V1."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Nothing: ``with_partial_penalties`` alone asks for it."""

    def is_argmax_invariant(self) -> bool:
        """Model runner V1: no."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Model runner V1: which requests there are."""
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
        seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
        seen[torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True
        counts = torch.zeros(self._vocabulary, dtype=torch.int32, device=self._device)
        request = _Request(penalties, output, seen, counts)
        request.count(prompt[len(prompt) - penalties.partial_tokens :])
        return request

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Model runner V2: a request takes a slot."""
        assert self._slots is not None
        self._slots.penalties.pop(req_idx, None)
        penalties = Penalties.of(sampling_params)
        if penalties is not None:
            self._slots.penalties[req_idx] = penalties
        return penalties is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """In place: [rows, vocabulary], fp32."""
        if self._slots is not None:
            assert ctx is not None
            self._slots.apply(logits, ctx)
            return logits
        for row, request in self._requests.items():
            request.catch_up()
            whole = slice(row, row + 1)
            logits[whole, : self._vocabulary] = penalized(
                logits[whole, : self._vocabulary],
                request.seen.unsqueeze(0),
                request.counts.unsqueeze(0),
                [request.penalties],
            )
        return logits
