"""Trainers that put a version into a folder and name its path, with the calls and bodies of their own clients."""

import asyncio

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from rollout_service.client import RolloutClient
from tests.support.checkpoints import save_checkpoint
from tests.support.delta_writer import publish
from tests.support.telltale import assert_pure, canary_weights


async def assert_served(client: RolloutClient, version: int) -> None:
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (version,)
    assert_pure(completion)


@pytest.mark.client("prime-rl with verifiers")
async def test_prime_rl_pushes_a_broadcast_folder(service, client, http, sources, next_version):
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


@pytest.mark.client("prime-rl with verifiers")
async def test_prime_rl_s_controller_finds_each_engine_s_load(http):
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert {s.labels["engine"] for s in samples if s.name == f"vllm:{name}"} == {"0", "1"}
    sizes = [s.labels["kv_cache_size_tokens"] for s in samples if s.name == "vllm:cache_config_info"]
    assert len(sizes) == 2 and all(int(size) > 1000 for size in sizes)


LONG = {"temperature": 1.0, "max_new_tokens": 1900, "ignore_eos": True}
SHORT = {"max_tokens": 8, "ignore_eos": True}


async def running(client: RolloutClient, sequences: int) -> None:
    """Return once replicas report so many sequences in flight."""
    while sum(replica.running for replica in (await client.fleet()).replicas) < sequences:
        await asyncio.sleep(0.05)


@pytest.mark.client("slime")
async def test_slime_updates_by_disk_and_gets_back_what_it_aborted(service, client, http, sources, telltale):
    version = telltale + 1
    folder = save_checkpoint(sources / f"weight_v{version:06d}", canary_weights(service.config.model.path, version))
    under_way = [
        asyncio.create_task(http.post("/generate", json={"input_ids": [5, 6], "sampling_params": LONG}))
        for _ in range(8)
    ]
    await running(client, 8)
    assert (await http.get("/flush_cache")).status_code == 200  # needs no pause, as in SGLang
    assert (await http.post("/pause_generation", json={})).json()["status"] == "ok"
    for task in under_way:
        meta = (await task).json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 1900
        assert {span["version"] for span in meta["weight_versions"]} <= {str(telltale)}
    assert (await http.get("/flush_cache")).status_code == 200
    body = {"model_path": str(folder), "weight_version": str(version)}
    reply = (await http.post("/update_weights_from_disk", json=body)).json()
    assert (reply["success"], reply["version"], reply["num_paused_requests"]) == (True, version, 0)
    assert (await http.post("/continue_generation", json={})).status_code == 200
    await assert_served(client, version)
    assert (await http.get("/model_info")).json()["weight_version"] == str(version)


@pytest.mark.slow
@pytest.mark.client("slime")
async def test_twenty_deltas_of_slime_are_served_one_by_one(service, client, http, sources):
    """As slime 624b824's update_weight_from_disk_delta.py asks at each step, with rollouts under way."""
    model, store, checkpoint = service.config.model.path, sources / "deltas", "/local/nvme/checkpoint"
    pull = {"local_checkpoint_dir": checkpoint, "source_dir": str(store)}
    store.mkdir()
    old: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    assert (await http.post("/pull_weights", json={**pull, "target_version": 0})).status_code == 200
    before = max(status.version for status in await client.weights())  # the model itself, if others were served
    for step in range(1, 21):
        version = before + step
        new = canary_weights(model, version)
        publish(store, step, old, new)
        under_way = asyncio.create_task(http.post("/generate", json={"input_ids": [5, 6], "sampling_params": LONG}))
        await running(client, 1)
        assert (await http.post("/pull_weights", json={**pull, "target_version": step})).status_code == 200
        assert not under_way.done()
        assert (await http.post("/pause_generation", json={})).status_code == 200
        assert (await under_way).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await http.get("/flush_cache")).status_code == 200
        body = {"model_path": checkpoint, "weight_version": str(step)}
        assert (await http.post("/update_weights_from_disk", json=body)).json()["version"] == version
        assert (await http.post("/continue_generation", json={})).status_code == 200
        await assert_served(client, version)
        old = new
    last, whole = version, await client.push_weights("next", new)
    digests = {status.version: status.digest for status in await client.weights()}
    assert digests[last] == whole.digest


@pytest.mark.client("slime")
async def test_aborting_everything_returns_it_and_goes_on(client, http):
    under_way = asyncio.create_task(
        http.post("/generate", json={"input_ids": [5, 6], "sampling_params": {**LONG, "n": 8}})
    )
    await running(client, 8)
    assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
    assert {each["meta_info"]["finish_reason"]["type"] for each in (await under_way).json()} == {"abort"}
    assert not await client.is_paused()
    assert len((await client.generate([5, 6], max_tokens=2, ignore_eos=True)).completions[0].token_ids) == 2


@pytest.mark.client("AReaL")
async def test_areal_s_pause_returns_completions_that_never_asked(service, client, http, sources, telltale):
    version = telltale + 1
    folder = save_checkpoint(sources / f"weight_update_v{version}", canary_weights(service.config.model.path, version))
    await client.pause("keep")  # what comes stays under way
    body = {"prompt": [5, 6], "max_tokens": 8, "ignore_eos": True, "return_tokens_as_token_ids": True, "logprobs": 0}
    under_way = asyncio.create_task(http.post("/v1/completions", json=body))
    native = asyncio.create_task(client.generate([5, 6], **SHORT))
    await running(client, 2)
    assert (await http.post("/areal_pause_generation", json={})).status_code == 200
    [choice] = (await under_way).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert (await native).completions[0].finish_reason == "abort"  # whoever asked
    later = asyncio.create_task(client.generate([5, 6], max_tokens=4, temperature=0.0))
    await running(client, 1)
    reply = await http.post("/areal_update_weights", json={"model_path": str(folder)})
    assert (reply.status_code, reply.json()["success"]) == (200, True)
    assert not later.done()
    assert (await http.post("/areal_continue_generation", json={})).status_code == 200
    assert (await later).completions[0].versions == (version,)


async def test_a_pause_of_ours_still_continues_what_it_aborts(client):
    await client.pause("keep")
    under_way = asyncio.create_task(client.generate([5, 6], **SHORT))
    await running(client, 1)
    await client.pause("abort")
    await client.resume()
    rollout = await under_way
    assert (rollout.completions[0].finish_reason, len(rollout.completions[0].token_ids)) == ("length", 8)
    assert rollout.attempts == 2
