"""A service knows when its model's keys are unfit for FP8."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollout_service.client import RolloutClient
from rollout_service.protocol.rollout import Rollout
from tests.engine.test_kv_measure import BATCH, CALIBRATED_MEAN
from tests.support.fp8_cache import needs_fp8_cache
from tests.support.key_channels import uneven_weights
from tests.support.models import make_model
from tests.support.own_service import own_service
from tests.support.reference import reference_logprobs, reference_model


def settings(folder: Path, weights: dict[str, torch.Tensor], **kv_cache: Any) -> dict[str, dict[str, Any]]:
    """A service whose version 0 has these weights, in BF16."""
    save_file(weights, folder / "model/model.safetensors")
    return {
        "model": {"path": str(folder / "model"), "create": None},
        "quant": {"weights": "none"},
        "engine": {"max_model_len": 256},
        "kv_cache": kv_cache,
        "weights": {"root": str(folder / "log"), "poll_s": 1.0},
    }


def mean_difference(model_path: Path, folder: Path, rollouts: list[Rollout]) -> float:
    """Mean |Δ| of the service's logprobs from those of the fp32 reference with the version in ``folder``."""
    reference = reference_model(model_path, folder, fp8_activations=False, fp8_kv=False)
    pairs = [(rollout.prompt_token_ids, completion) for rollout in rollouts for completion in rollout.completions]
    differences = [reference_logprobs(reference, p, c.token_ids, 1.0) - torch.tensor(c.logprobs) for p, c in pairs]
    return float(torch.cat(differences).abs().mean())


@needs_fp8_cache
async def test_keys_that_no_scale_saves_get_bf16_and_the_fleet_says_so(tmp_path):
    model = make_model(tmp_path / "model", "llama")
    overrides = settings(tmp_path, uneven_weights(model, seed=0), dtype="auto")
    async with own_service(overrides) as (url, _), RolloutClient(url) as client:
        [replica] = (await client.fleet()).replicas
        assert replica.kv_cache is not None and replica.kv_cache.choice.dtype == "bfloat16"
        assert "FP8 is not accurate enough for the keys and values of 2 of 2 layers" in replica.kv_cache.choice.why
        found = await client.generate_batch([[*row[:20]] for row in BATCH], n=2, max_tokens=24, ignore_eos=True)
        assert mean_difference(model, tmp_path / "log/0", found) < CALIBRATED_MEAN
        await client.push_weights(1, load_file(model / "model.safetensors"))
        assert (await client.weights(1)).state == "live"
    assert json.loads((tmp_path / "log/KV_CACHE").read_text())["dtype"] == "bfloat16"
