"""slime 624b824's calls, through sglang-router 0.3.2 as slime starts it; slime itself is not on the package index."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollout_service.client import RolloutClient
from rollout_service.local import free_port
from tests.clients.conftest import PROJECT, folder_of
from tests.support.checkpoints import save_checkpoint
from tests.support.delta_writer import publish
from tests.support.native_route import LOGPROB_TOLERANCE, assert_as_native
from tests.support.telltale import canary_weights, token_of

pytestmark = pytest.mark.client("slime")

LONG = 480
SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 8,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "ignore_eos": True,
}


@pytest.fixture
async def router(service_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The router, as slime/ray/rollout.py starts it, with the service as its one worker."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    options += ["--disable-circuit-breaker", "--disable-health-check"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_router.launch_router", *options),
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(folder_of("slime"))},  # noqa: TID251
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as router:
            await first_answer(router, process)
            registered = await router.post("/workers", json={"url": service_url, "worker_type": "regular"})
            registered.raise_for_status()
            while not (found := (await router.get("/workers")).json()["workers"]):
                await asyncio.sleep(0.1)
            assert [each["url"] for each in found] == [service_url]
            yield router
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def first_answer(router: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    """Return when the router answers."""
    while True:
        assert process.returncode is None, "the router has ended"
        try:
            await router.get("/workers")
            return
        except httpx.TransportError:
            await asyncio.sleep(0.1)


async def generate(router: httpx.AsyncClient, input_ids: list[int], **sampling: Any) -> dict[str, Any]:
    """As slime/rollout/sglang_rollout.py asks."""
    body = {"input_ids": input_ids, "sampling_params": {**SAMPLING, **sampling}, "return_logprob": True}
    reply = await router.post("/generate", json=body, headers={"X-SMG-Routing-Key": "session-1"})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def runs(client: RolloutClient) -> None:
    """Return once a replica reports a rollout in flight."""
    while sum(replica.running for replica in (await client.fleet()).replicas) < 1:
        await asyncio.sleep(0.05)


async def test_the_router_finds_what_it_asks_for(router, model):
    [worker] = (await router.get("/workers")).json()["workers"]
    assert worker["is_healthy"] and worker["connection_mode"] == "HTTP"
    assert worker["model_id"] in (str(model), model.name) and worker["metadata"]["tp_size"] == "1"


async def test_rollouts_have_the_native_tokens(router, client, push):
    for _ in range(2):
        version = await push()
        meta = (await generate(router, [8, 9, 10]))["meta_info"]
        logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        tokens = [token for _, token, _ in meta["output_token_logprobs"]]
        await assert_as_native(client, [8, 9, 10], tokens, logprobs, version=version)
        assert meta["weight_version"] == str(version) and meta["finish_reason"]["type"] == "length"


async def test_a_teacher_scores_given_tokens(router, client, push):
    """As slime/rollout/on_policy_distillation.py asks, and several at once, as miles does."""
    await push()
    tokens, sampling = [8, 9, 10, 11, 12], {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": [tokens] * 2, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    replies = await router.post("/generate", json=body)
    one = await router.post("/generate", json={**body, "input_ids": tokens})
    expected = (await client.score(tokens)).logprobs.tolist()
    for reply in (*replies.json(), one.json()):
        (first, *_), *rows = reply["meta_info"]["input_token_logprobs"]
        assert first is None and [row[1] for row in rows] == tokens[1:]
        assert [row[0] for row in rows] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert reply["output_ids"] == []


async def test_a_repeated_prompt_counts_as_cached(router, push):
    """slime and miles sum ``cached_tokens`` as their prefix hit rate (``utils/types.py``)."""
    await push()
    first, second = [(await generate(router, [8, 9, 10] * 100))["meta_info"]["cached_tokens"] for _ in range(2)]
    assert first == 0 and 200 < second < 300


async def test_an_update_by_disk_returns_what_it_aborts(router, service_url, client, model, sources, next_version):
    """Weights go past the router; a sample that came back aborted is asked for again, with its tokens."""
    old, new = next_version, next_version + 1
    await client.push_weights(old, canary_weights(model, old))
    folder = save_checkpoint(sources / f"weight_v{new:06d}", canary_weights(model, new))
    rollout = asyncio.create_task(generate(router, [8, 9, 10], max_new_tokens=LONG))
    await runs(client)
    async with httpx.AsyncClient(base_url=service_url, timeout=120) as engine:
        (await engine.post("/pause_generation", json={})).raise_for_status()
        aborted = await rollout
        (await engine.get("/flush_cache")).raise_for_status()
        body = {"model_path": str(folder), "weight_version": str(new)}
        (await engine.post("/update_weights_from_disk", json=body)).raise_for_status()
        (await engine.post("/continue_generation", json={})).raise_for_status()
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert aborted["meta_info"]["weight_version"] == str(old)
    assert len(aborted["output_ids"]) < LONG and set(aborted["output_ids"]) == {token_of(old)}
    rest = await generate(router, [8, 9, 10, *aborted["output_ids"]])
    assert rest["output_ids"] == [token_of(new)] * 8 and rest["meta_info"]["weight_version"] == str(new)


async def test_deltas_are_pulled_beside_rollouts_and_served(router, service_url, client, model, sources):
    """As slime's update_weight_from_disk_delta.py asks, whose numbers begin at 1."""
    store, checkpoint = sources / "deltas", "/local/nvme/checkpoint"
    pull = {"local_checkpoint_dir": checkpoint, "source_dir": str(store)}
    old: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    store.mkdir()
    async with httpx.AsyncClient(base_url=service_url, timeout=120) as engine:
        (await engine.post("/pull_weights", json={**pull, "target_version": 0})).raise_for_status()
        for version in (1, 2):
            new = canary_weights(model, version)
            publish(store, version, old, new)
            rollout = asyncio.create_task(generate(router, [8, 9, 10], max_new_tokens=LONG))
            await runs(client)
            served = (await client.fleet()).latest_version
            (await engine.post("/pull_weights", json={**pull, "target_version": version})).raise_for_status()
            assert (await client.fleet()).latest_version == served and not rollout.done()
            (await engine.post("/pause_generation", json={})).raise_for_status()
            assert (await rollout)["meta_info"]["finish_reason"]["type"] == "abort"
            (await engine.get("/flush_cache")).raise_for_status()
            body = {"model_path": checkpoint, "weight_version": str(version)}
            updated = await engine.post("/update_weights_from_disk", json=body)
            (await engine.post("/continue_generation", json={})).raise_for_status()
            reply = await generate(router, [8, 9, 10])
            assert reply["output_ids"] == [token_of(version)] * 8
            assert reply["meta_info"]["weight_version"] == str(updated.json()["version"])
            old = new
        refused = await engine.post("/pull_weights", json={**pull, "target_version": 4})
    assert refused.status_code == 400 and refused.json()["success"] is False
    assert "version 4 is not published" in refused.json()["message"]


async def test_aborting_all_ends_what_the_router_awaits(router, client):
    """slime asks the router for its workers, and each of them to abort."""
    rollout = asyncio.create_task(generate(router, [8, 9, 10], max_new_tokens=LONG))
    await runs(client)
    async with httpx.AsyncClient(timeout=120) as http:
        for worker in (await router.get("/workers")).json()["workers"]:
            (await http.post(f"{worker['url']}/abort_request", json={"abort_all": True})).raise_for_status()
    assert (await rollout)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_refusal_comes_through_the_router(router):
    reply = await router.post("/generate", json={"input_ids": [10**6], "sampling_params": SAMPLING})
    assert reply.status_code == 400 and "outside the vocabulary" in reply.json()["error"]["message"]
