"""The ingest on a GPU, a trainer on a GPU, and the ingest on the CPU make the same version of the same weights."""

from collections.abc import Mapping
from pathlib import Path

import torch

from rollout_service.config.engine import QuantConfig
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from tests.support.models import make_model, random_weights


def converted(
    recipe: TrainerRecipe, device: str, weights: Mapping[str, torch.Tensor], **options: int
) -> dict[str, bytes]:
    """Stored name → bytes."""
    converter = Converter(recipe, device=device, **options)  # type: ignore[arg-type]
    return {
        name: tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in converter.convert(weights.items())
    }


def test_the_device_changes_no_byte_of_a_version(tmp_path: Path) -> None:
    model = ServedModel.load(make_model(tmp_path / "model", "qwen3_moe"))
    plan = model.plan(QuantConfig())
    recipe = TrainerRecipe(weights="fp8_block", quantized=tuple(plan.quantized), experts=model.experts)
    weights = random_weights(model.path, seed=0)
    on_gpu = {name: weight.cuda() for name, weight in weights.items()}
    on_the_cpu = converted(recipe, "cpu", weights)
    assert len(on_the_cpu) > len(weights)
    assert converted(recipe, "cuda", weights) == on_the_cpu
    assert converted(recipe, "cuda", weights, batch_bytes=100_000) == on_the_cpu
    assert converted(recipe, "auto", on_gpu) == on_the_cpu
