"""Engines that compute otherwise by a setting of vLLM's: each serves versions as others do."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.engine.test_round_trip import BF16_MEAN
from tests.support.models import EMBEDDING, random_weights
from tests.support.one_engine import OneEngine, mean_difference, running
from tests.support.reference import reference_logprobs, reference_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


async def long_difference(one: OneEngine, model: Path, folder: Path) -> float:
    """Mean |Δ| of the engine's logprobs of a long sequence from the reference with the config.json in ``model``."""
    tokens = tuple(range(3, 103)) * 2
    engine = await one.logprobs([tokens])
    reference = reference_model(model, folder, fp8_activations=False, fp8_kv=False)
    return float((reference_logprobs(reference, tokens[:1], tokens[1:], 1.0) - engine).abs().mean())


@pytest.mark.slow  # an engine of its own
async def test_rope_scaling_is_the_engine_s(tmp_path, monkeypatch):
    overrides = {"rope_parameters": YARN, "max_position_embeddings": 256}
    async with running("llama", tmp_path, monkeypatch, quant="none", extra={"hf_overrides": overrides}) as one:
        plain, scaled = one.config.model.path, tmp_path / "scaled"
        shutil.copytree(plain, scaled)
        config = json.loads((plain / "config.json").read_text())
        config["rope_parameters"] = config["rope_parameters"] | YARN
        (scaled / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
        for version in (1, 2):
            folder = await one.update(version, random_weights(plain, seed=version))
            with_scaling = await long_difference(one, scaled, folder)
            assert with_scaling < BF16_MEAN
            # twice where the processor has AMX, with which attention is in BF16; equal if the engine did not scale
            assert await long_difference(one, plain, folder) > 1.5 * with_scaling


def head_alone(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights with which layers add nothing and norms change nothing: what is rounded are logits alone."""
    weights = random_weights(model, seed=seed)
    for name, weight in weights.items():
        if name == EMBEDDING:
            weight.copy_(torch.where(weight < 0, -1, 1))
        elif name.endswith("norm.weight"):
            weight.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return weights


@pytest.mark.slow  # two engines
async def test_logits_in_fp32_are_not_rounded(tmp_path, monkeypatch):
    found = {}
    for head in ("bfloat16", "float32"):
        async with running("llama", tmp_path / head, monkeypatch, quant="none", lm_head=head) as one:
            for version in (1, 2):
                folder = await one.update(version, head_alone(one.config.model.path, version))
                found[head, version] = await mean_difference(one, folder, fp8=False)
    assert max(found["float32", 1], found["float32", 2]) < 1e-4
    assert min(found["bfloat16", 1], found["bfloat16", 2]) > 1e-3


@pytest.mark.slow  # an engine of its own
async def test_a_tied_head_in_fp32_follows_updates(tmp_path, monkeypatch):
    async with running("qwen2", tmp_path, monkeypatch, quant="none", lm_head="float32") as one:
        for version in (1, 2):
            folder = await one.update(version, random_weights(one.config.model.path, seed=version))
            assert await mean_difference(one, folder, fp8=False) < BF16_MEAN
