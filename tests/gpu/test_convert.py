"""The ingest on a GPU, a trainer on a GPU, and the ingest on the CPU make the same version of the same weights."""

from collections.abc import Mapping

import pytest
import torch

from rollout_service.config.engine import QuantConfig
from rollout_service.errors import QuantizationError
from rollout_service.gpu.streams import own_stream_done
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.deferred_checks import DeferredChecks
from tests.support.models import make_model, random_weights


def converted(
    recipe: TrainerRecipe, device: str, weights: Mapping[str, torch.Tensor], **options: int
) -> dict[str, bytes]:
    """Stored name → bytes."""
    converter = Converter(recipe, device=device, **options)
    return {
        name: tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in converter.convert(weights.items())
    }


def recipe_of(model: ServedModel) -> TrainerRecipe:
    quantized = tuple(model.plan(QuantConfig()).quantized)
    return TrainerRecipe(weights="fp8_block", quantized=quantized, experts=model.experts)


def test_the_device_changes_no_byte_of_a_version(tmp_path):
    model = ServedModel.load(make_model(tmp_path / "model", "qwen3_moe"))
    recipe = recipe_of(model)
    weights = random_weights(model.path, seed=0)
    on_gpu = {name: weight.cuda() for name, weight in weights.items()}
    on_the_cpu = converted(recipe, "cpu", weights)
    assert len(on_the_cpu) > len(weights)
    assert converted(recipe, "cuda", weights) == on_the_cpu
    assert converted(recipe, "cuda", weights, batch_bytes=100_000) == on_the_cpu
    assert converted(recipe, "auto", on_gpu) == on_the_cpu


def queued(recipe: TrainerRecipe, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stored name → tensor on the GPU, after one wait for all of them."""
    gpu, checks = torch.device("cuda", 0), DeferredChecks()
    with own_stream_done(gpu):
        stored = dict(Converter(recipe).convert(weights.items(), to_cpu=False, checks=checks))
        require_sound = checks.collect()
    require_sound()
    return stored


def test_what_is_waited_for_once_is_the_same_and_what_is_wrong_is_named(tmp_path):
    model = ServedModel.load(make_model(tmp_path / "model", "qwen3_moe"))
    recipe = recipe_of(model)
    weights = {name: weight.cuda() for name, weight in random_weights(model.path, seed=0).items()}
    at_once = dict(Converter(recipe).convert(weights.items(), to_cpu=False))
    at_the_end = queued(recipe, weights)
    assert list(at_the_end) == list(at_once)
    assert all(torch.equal(at_the_end[n].view(torch.uint8), t.view(torch.uint8)) for n, t in at_once.items())
    kept = next(name for name in weights if name in at_once and name not in recipe.quantized)
    for name in (kept, next(name for name in recipe.quantized if name in weights)):
        unsound = weights[name].clone()
        unsound.view(-1)[-1] = float("inf")
        with pytest.raises(QuantizationError, match=f"{name}.* is inf"):
            queued(recipe, weights | {name: unsound})
