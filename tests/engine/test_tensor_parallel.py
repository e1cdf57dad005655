"""A real engine of two ranks on the CPU: it starts, follows versions, and computes what one rank computes."""

import os
import shutil

import pytest

from rollout_service.errors import LogCorrupt
from rollout_service.store.log import WeightLog
from tests.engine.test_round_trip import FP8_MEAN
from tests.support.engine_layout import expert_digests, quantize
from tests.support.models import NUM_EXPERTS, random_weights
from tests.support.one_engine import PROMPTS, mean_difference, running
from tests.unit.store.versions import flip_a_byte

BETWEEN_RANKS_MEAN = 0.03
"""Mean |Δ| of logprobs between one rank and two: sums of BF16 in another order. Another version's are 10 times that."""
TOKENS = [tuple((5 * i + 7 * j) % 120 + 3 for j in range(40)) for i in range(len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.timeout(900)  # two engines, one after the other
@pytest.mark.parametrize(
    ("family", "quant", "expert_parallel"),
    [
        ("qwen3_tp", "fp8_block", False),
        ("qwen3_moe_tp", "fp8_block", False),
        ("qwen3_moe_tp", "fp8_channel", False),
        ("qwen3_moe_tp", "int8_channel", False),
        ("qwen3_moe_ep", "fp8_block", True),
        ("qwen3_moe_ep", "none", True),
    ],
)
async def test_two_ranks_follow_versions_and_agree_with_one(family, quant, expert_parallel, tmp_path, monkeypatch):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    quantized = quant != "none"
    engine = {"tensor_parallel_size": 2, "expert_parallel": expert_parallel}
    with monkeypatch.context() as bound:
        bound.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")  # vLLM wants a NUMA node for each rank else
        async with running(family, tmp_path, bound, quant=quant, **engine) as two:
            for version in (1, 2, 3):
                weights = random_weights(two.config.model.path, seed=version)
                folder = await two.update(version, weights)
                reports = await two.load_reports()
                assert [report["way"] for report in reports] == ["layerwise", "layerwise"]
                assert not any("unstaged" in report for report in reports)
            assert await mean_difference(two, folder, fp8=quantized) < FP8_MEAN
            if expert_parallel and quantized:
                held = await two.engine.ask_workers("weight_digests")
                for rank in range(2):
                    expected = expert_digests(quantize(weights), rank, ranks=2)
                    assert {name: held[rank][name] for name in expected} == expected
            if expert_parallel:
                for rank, held in enumerate(await two.engine.ask_workers("expert_ids")):
                    half = NUM_EXPERTS // 2
                    assert set(map(tuple, held.values())) == {tuple(range(rank * half, (rank + 1) * half))}
            of_two = await two.logprobs(TOKENS)

            # a version that is damaged where only one rank reads it is refused before the engine is closed
            log = WeightLog(two.config.weights.root)
            before = shutil.copytree(log.folder(2), tmp_path / "version-2")  # the log drops it for the next one
            damaged = await two.commit(4, random_weights(two.config.model.path, seed=4))
            flip_a_byte(log, 4, "model.layers.1.self_attn.o_proj.weight")
            with pytest.raises(LogCorrupt, match=r"layers\.1\.self_attn\.o_proj\.weight"):
                await two.engine.stage(damaged, log.manifest(4).digest)
            assert (await two.logprobs(TOKENS) == of_two).all()

    again = tmp_path / "one"
    again.mkdir()
    async with running(family, again, monkeypatch, quant=quant) as one:
        await one.load(folder, 3)
        assert (await one.logprobs(TOKENS) - of_two).abs().mean() < BETWEEN_RANKS_MEAN
        await one.load(before, 2)
        assert (await one.logprobs(TOKENS) - of_two).abs().mean() > 10 * BETWEEN_RANKS_MEAN
