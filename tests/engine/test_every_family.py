"""Every family that vLLM builds, small: an engine of it follows an update, and its logprobs are those of a reference.

``python -m benchmarks.families`` keeps what these tests record, and makes docs/models.md of it.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.model.vllm_layout import read_layout
from tests.support import families
from tests.support.one_engine import OneEngine, running
from tests.support.reference import reference_logprobs, reference_of_any

pytestmark = pytest.mark.slow
Record = Callable[[str, object], None]
# Bound on the mean of |Δ|, the difference of a token's logprob from the fp32 reference, over 256 tokens: as in
# test_round_trip.py, and the inputs of experts' second product, which the reference does not round.
MEAN = 0.1
ON_A_GPU: dict[str, Any] = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True}
"""No compiler and no graphs: what is tested are weights."""
if importlib.util.find_spec("flashinfer") is None:  # vLLM takes its kernel for linear attention without looking
    ON_A_GPU["extra"] = {"gdn_prefill_backend": "triton"}


async def difference(one: OneEngine, folder: Path, scratch: Path) -> float:
    """Mean |Δ| of the engine's logprobs from those of the fp32 reference with the version in ``folder``."""
    reference = reference_of_any(one.config.model.path, folder, scratch)
    pairs = await one.sample()
    found = [reference_logprobs(reference, p, c.token_ids, 1.0) - torch.tensor(c.logprobs) for p, c in pairs]
    return float(torch.cat(found).abs().mean())


@pytest.mark.parametrize("family", families.FAMILIES)
async def test_a_family_follows_an_update(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
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
        assert await difference(one, first, tmp_path / "first") < MEAN
        second = await one.update(2, families.family_weights(folder, 2))
        found = await difference(one, second, tmp_path / "second")
        record_property("difference", found)
        assert found < MEAN
        # the version before is another model, however sharp or flat a family's distributions are
        assert await difference(one, first, tmp_path / "again") > 2 * found
