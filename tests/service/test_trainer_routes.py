"""Trainers that put a version into a folder and name its path, with the calls and bodies of their own clients."""

import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from tests.support.telltale import assert_pure, canary_weights


def save_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """Hugging Face's layout with an index over two files, as trainers write it."""
    folder.mkdir()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: file for file, held in files.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


async def assert_served(client: RolloutClient, version: int) -> None:
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (version,)
    assert_pure(completion)


async def test_prime_rl_pushes_a_broadcast_folder(
    service: LocalService, client: RolloutClient, http: httpx.AsyncClient, sources: Path, next_version: int
) -> None:
    assert (await http.get("/health")).status_code == 200
    [card] = (await http.get("/v1/models")).json()["data"]
    assert card["max_model_len"] > 0
    weights = canary_weights(service.config.model.path, next_version)
    folder = save_checkpoint(sources / f"step_{next_version}", weights)
    (folder / "STABLE").touch()
    assert (await http.post("/pause?mode=keep&clear_cache=false")).status_code == 200
    (folder / "NCCL_READY").touch()
    replies = [await http.post("/update_weights", json={"weight_dir": str(folder)}) for _ in range(2)]
    assert (await http.post("/resume")).status_code == 200
    assert [reply.json() for reply in replies] == [{"status": "ok", "version": next_version}] * 2
    await assert_served(client, next_version)
    assert (await client.fleet()).latest_version == next_version


async def test_prime_rl_s_failed_push_leaves_what_is_served(
    service: LocalService, client: RolloutClient, http: httpx.AsyncClient, sources: Path, telltale: int
) -> None:
    assert (await http.post("/pause?mode=keep&clear_cache=false")).status_code == 200
    missing = await http.post("/update_weights", json={"weight_dir": str(sources / f"step_{telltale + 1}")})
    outside = await http.post("/update_weights", json={"weight_dir": "/"})
    assert (await http.post("/resume")).status_code == 200
    assert missing.status_code == 404 and "is not a folder that the ingest can see" in missing.text
    assert outside.status_code == 403 and "weights.source_roots" in outside.text
    await assert_served(client, telltale)


async def test_prime_rl_s_controller_finds_each_engine_s_load(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert {s.labels["engine"] for s in samples if s.name == f"vllm:{name}"} == {"0", "1"}
    sizes = [s.labels["kv_cache_size_tokens"] for s in samples if s.name == "vllm:cache_config_info"]
    assert len(sizes) == 2 and all(int(size) > 1000 for size in sizes)
