"""Engines with arguments of vLLM's that have no setting of ours: each serves versions as others do."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, running
from tests.support.reference import reference_logprobs, reference_model

BF16_MEAN = 0.02
"""Bound on the mean difference from the fp32 reference: see tests/engine/test_round_trip.py."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


async def long_difference(one: OneEngine, model: Path, folder: Path) -> float:
    """Mean |Δ| of the engine's logprobs of a long sequence from the reference with the config.json in ``model``."""
    tokens = tuple(range(3, 103)) * 2
    engine = await one.logprobs([tokens])
    reference = reference_model(model, folder, fp8_activations=False, fp8_kv=False)
    return float((reference_logprobs(reference, tokens[:1], tokens[1:], 1.0) - engine).abs().mean())


@pytest.mark.slow  # an engine of its own
async def test_rope_scaling_is_the_engine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert await long_difference(one, plain, folder) > 2 * with_scaling
