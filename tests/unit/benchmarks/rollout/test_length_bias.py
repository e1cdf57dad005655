"""What a trainer counts of the completions that its updates abort."""

import asyncio
import random

import pytest

from benchmarks.rollout.length_bias import TREATMENTS, LoadOptions, Trainer, Treatment, kolmogorov_smirnov
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.rollout import Completion, FinishReason, Span
from rollout_service.protocol.sampling import Sampling

LENGTHS = (2, 4, 30)
"""Tokens of the completion of the first request, of the second, of the third, of the fourth as of the first, …"""


class SteppingEngine:
    """In the adapter's place: a token each turn of the event loop, the same completions whenever it is asked."""

    def __init__(self) -> None:
        self._aborts = 0
        self._prompts: dict[str, int] = {}

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], _: Sampling, partial_tokens: int
    ) -> tuple[Completion, ...]:
        assert partial_tokens == len(prompt) - 2
        number = self._prompts.setdefault(request_id, len(self._prompts))
        length, before, aborts = LENGTHS[number % len(LENGTHS)], len(prompt) - 2, self._aborts
        made = 0
        while before + made < length and aborts == self._aborts:
            made += 1
            await asyncio.sleep(0)
        return (completion(made, "stop" if before + made == length else "abort"),)

    async def pause(self, mode: PauseMode) -> None:
        assert mode == "abort"
        self._aborts += 1

    async def resume(self) -> None: ...


def completion(tokens: int, reason: FinishReason) -> Completion:
    spans = (Span(version=0, start=0, end=tokens),) if tokens else ()
    return Completion(index=0, token_ids=(7,) * tokens, logprobs=(-1.0,) * tokens, finish_reason=reason, spans=spans)


@pytest.mark.parametrize("treatment", TREATMENTS, ids=lambda treatment: treatment.name)
async def test_what_is_delivered_is_counted(treatment: Treatment) -> None:
    options = LoadOptions(completions=30, at_once=6)
    case = await Trainer(SteppingEngine(), treatment, options).run()  # type: ignore[arg-type]
    assert case.completions >= 30
    assert sum(case.histogram.values()) == pytest.approx(1, abs=1e-3)
    assert case.delivered_tokens == pytest.approx(case.completions * case.mean_tokens, rel=0.01)
    assert (case.aborts > 0) == treatment.aborts
    assert (case.dropped > 0) == (treatment.on_abort == "return")
    if not treatment.restarts and treatment.on_abort == "continue":
        assert case.sampled_tokens == case.delivered_tokens
        assert case.truncated == 0
    else:
        assert case.sampled_tokens > case.delivered_tokens


def test_the_same_distribution_is_told_from_another() -> None:
    draw = random.Random(0)
    one, same, shorter = ([min(320, int(draw.expovariate(1 / mean))) for _ in range(2000)] for mean in (43, 43, 36))
    statistic, p = kolmogorov_smirnov(one, same)
    assert statistic < 0.05 and p > 0.05
    assert kolmogorov_smirnov(one, shorter)[1] < 1e-4
    assert kolmogorov_smirnov([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    # 1.358 is the critical value at 5%: https://en.wikipedia.org/wiki/Kolmogorov-Smirnov_test
    assert kolmogorov_smirnov([0] * 1000 + [1] * 1000, [0] * 1086 + [1] * 914)[1] == pytest.approx(0.0496, abs=0.001)
