"""Every family that vLLM builds, small: an engine of it follows an update, and its logprobs are those of a reference.

``python -m benchmarks.families`` keeps what these tests record, and makes docs/models.md of it.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.model.engine_layout import read_layout
from tests.support import families
from tests.support.one_engine import OneEngine, running
from tests.support.reference import reference_logprobs, reference_of_any

pytestmark = pytest.mark.slow
MEAN = 0.1
"""Bound on the mean of |Δ|, the difference of a token's logprob from the fp32 reference, over 256 tokens: as in
test_round_trip.py, and the inputs of experts' second product, which the reference does not round."""
ON_A_GPU: dict[str, Any] = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True}
"""No compiler and no graphs: what is tested are weights."""
FAILS = {"qwen3_vl_moe": "vLLM expects the experts the other way round than transformers 5.19 saves them"}
"""Family → why an engine of it fails."""
if not torch.cuda.is_available():
    FAILS |= {
        **dict.fromkeys(("jamba", "mamba2"), "refused: vLLM's CPU engine dies of it, a GPU's does not"),
        "ernie4_5_moe": "vLLM's router for the CPU leaves the correction bias out of a softmax",
        "gpt_neox": "vLLM's own load of the same weights is as far from the reference",
        "glm4_moe_lite": "with vLLM on the CPU its logprobs are 0.2 from the reference, in BF16 too",
        "lfm2_moe": "with vLLM on the CPU its logprobs are 0.14 from the reference, in BF16 too",
        "minimax_m2": "vLLM's router for the CPU knows no sigmoid without groups of experts",
        "phimoe": "transformers' router returns something else than vLLM expects",
    }
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        FAILS["phi"] = "vLLM's product for CPUs with AMX wants the bias of the head in fp32"
if importlib.util.find_spec("flashinfer") is None:  # vLLM takes its kernel for linear attention without looking
    ON_A_GPU["extra"] = {"gdn_prefill_backend": "triton"}


async def difference(one: OneEngine, folder: Path, scratch: Path) -> tuple[float, float]:
    """Mean |Δ| of the engine's logprobs from those of the fp32 reference with the version in ``folder``; its bound.

    Some families are more sensitive than ``MEAN`` to BF16 and to the rounding of inputs to FP8. Of these the engine may
    differ by as much as two computations with independent errors do: √2 times what BF16 and FP8 do to the reference.
    """
    pairs = await one.sample()

    def logprobs(name: str, dtype: torch.dtype, fp8: bool) -> torch.Tensor:
        model = reference_of_any(one.config.model.path, folder, scratch / name, dtype=dtype, fp8_activations=fp8)
        return torch.cat([reference_logprobs(model, prompt, made.token_ids, 1.0).float() for prompt, made in pairs])

    expected = logprobs("expected", torch.float32, fp8=True)
    noise = logprobs("as the engine", torch.bfloat16, fp8=True) - logprobs("exact", torch.float32, fp8=False)
    of_engine = torch.tensor([logprob for _, made in pairs for logprob in made.logprobs])
    return float((expected - of_engine).abs().mean()), max(MEAN, 2**0.5 * float(noise.abs().mean()))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.xfail(reason=FAILS[family]) if family in FAILS else ())
        for family in families.FAMILIES
    ],
)
async def test_a_family_follows_an_update(family, tmp_path, monkeypatch, record_property):
    record_property("family", family)
    folder = families.make_family(tmp_path / "family", family)
    try:
        read_layout(folder)
    except ValueError as refusal:  # vLLM's own
        pytest.skip(str(refusal))

    def make(place: Path, name: str) -> Path:
        return families.make_family(place, name)

    settings = ON_A_GPU if torch.cuda.is_available() else {}
    async with running(family, tmp_path, monkeypatch, make=make, indivisible="keep_bf16", **settings) as one:
        first = await one.update(1, families.family_weights(folder, 1))
        found, bound = await difference(one, first, tmp_path / "first")
        assert found < bound
        second = await one.update(2, families.family_weights(folder, 2))
        found, bound = await difference(one, second, tmp_path / "second")
        record_property("difference", found)
        assert found < bound
        # the version before is another model, however sharp or flat a family's distributions are
        of_another, _ = await difference(one, first, tmp_path / "again")
        assert of_another > 2 * found


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="an engine of two ranks wants two GPUs")
@pytest.mark.parametrize("family", ["glm4", "glm4_moe", "olmoe", "phi3"])
async def test_two_ranks_of_a_family_follow_an_update(family, tmp_path, monkeypatch, record_property):
    """Families that are in no table of ours: vLLM's classes say how layers are cut; all shards are whole FP8 blocks."""
    settings = dict(ON_A_GPU)
    if not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))[:2]  # vLLM wants a NUMA node for each rank else
        settings = {"env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}}

    def make(place: Path, name: str) -> Path:
        return families.make_family(place, name, changes=families.HALVES_DIVIDE)

    async with running(family, tmp_path, monkeypatch, make=make, tensor_parallel_size=2, **settings) as one:
        folder = one.config.model.path
        first = await one.update(1, families.family_weights(folder, 1))
        second = await one.update(2, families.family_weights(folder, 2))
        found, bound = await difference(one, second, tmp_path / "second")
        record_property("difference", found)
        assert found < bound
        of_another, _ = await difference(one, first, tmp_path / "again")
        assert of_another > 2 * found
