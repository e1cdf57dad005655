"""Mixtures of experts: by the names of a checkpoint, and stacked as transformers holds them in memory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_service.errors import QuantizationError
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.log import WeightLog
from tests.support.models import make_model
from tests.unit.ingest import expected
from tests.unit.ingest.trainer import Trainer, changed, folder_weights

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def in_memory(model: Path) -> dict[str, torch.Tensor]:
    """The state dict of a trainer that has loaded the folder."""
    return dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict())


@pytest.fixture(scope="session")
def stacked(moe_model: Path) -> dict[str, torch.Tensor]:
    return in_memory(moe_model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
async def test_stacked_and_separate_experts_give_the_expected_digest(start, tmp_path, family):
    model = make_model(tmp_path / family, family)
    ingest, on_disk = await start(model, tmp_path / "log"), folder_weights(model)
    digest = expected.digest(on_disk, ServedModel.load(model).fingerprint)
    assert (await ingest.status(0)).digest == digest
    held = in_memory(model)
    assert any(tensor.dim() == 3 for tensor in held.values()) and all(t.dim() < 3 for t in on_disk.values())
    assert (await Trainer(ingest).push(1, held)).digest == digest
    assert (await Trainer(ingest).push(2, on_disk)).digest == digest


async def test_a_nan_in_a_stacked_tensor_is_named_by_its_expert(start, moe_model, tmp_path, stacked):
    ingest = await start(moe_model, tmp_path / "log")
    broken = changed(stacked, 0.0)
    broken[GATE_UP][5, 130, 9] = float("nan")
    with pytest.raises(QuantizationError, match=r"layers\.0\.mlp\.experts\.5\.up_proj\.weight\[2, 9\] is nan"):
        await Trainer(ingest).push(1, broken)
    assert (await ingest.fleet()).latest_version == 0


async def test_experts_that_the_recipe_skips_are_stored_in_bf16(start, moe_model, tmp_path, stacked):
    ingest = await start(moe_model, tmp_path / "log", quant={"skip": ["*.layers.0.mlp.experts.*"]})
    await Trainer(ingest).upload(1, stacked)
    await ingest.commit(1, CommitUpload())
    stored = {tensor.name: tensor.dtype for tensor in WeightLog(tmp_path / "log").manifest(1).tensors}
    assert stored["model.layers.0.mlp.experts.2.up_proj.weight"] == "bfloat16"
    assert stored["model.layers.1.mlp.experts.2.up_proj.weight"] == "float8_e4m3fn"
