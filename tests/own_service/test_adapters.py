"""LoRA adapters on two replicas: updates under load, a replica that dies and one that starts, and other routes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import NotFound
from rollout_service.protocol.adapters import AdapterStatus
from rollout_service.protocol.rollout import Rollout
from tests.support.adapters import CONFIG as FULL_CONFIG
from tests.support.adapters import save_adapter, telltale_of_all_layers
from tests.support.own_service import own_service
from tests.support.telltale import CYCLE, assert_made_by, canary_weights, telltale_adapter, token_of

PROMPT = [5, 6, 7, 9, 11]
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["down_proj"]}
OF_A, NEXT_OF_A, OF_B = 20, 21, 22
"""Numbers whose tokens the adapters emit."""
VERSIONS, MORE_BYTES = 1000, 300 << 20
"""Versions of one adapter, and the bytes that no process may grow by from the hundredth on; a version has 0.4 MB."""
MAX_LIVE = 4
LONG = 1000
"""Tokens of a rollout that runs while an adapter is pushed."""


@pytest.fixture
async def model(tmp_path: Path) -> Path:
    return tmp_path / "tiny-qwen3"


@pytest.fixture
async def running(tmp_path: Path, model: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    overrides = {
        "model": {"path": str(model)},
        "engine": {"adapters": {"max_live": MAX_LIVE, "max_rank": 8}, "max_model_len": 2048, "version_wait_s": 6.0},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "weights": {"root": str(tmp_path / "log"), "source_roots": [str(tmp_path)], "poll_s": 1.0, "dead_after_s": 5.0},
    }
    async with own_service(overrides) as found:
        yield found


@pytest.fixture
async def client(running: tuple[str, psutil.Process], model: Path) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(running[0]) as client:
        await _until_two_serve(client)
        await client.push_weights(1, canary_weights(model, 1))
        yield client


async def test_adapters_are_served_through_updates_and_a_lost_replica(
    running: tuple[str, psutil.Process], client: RolloutClient, model: Path, tmp_path: Path
) -> None:
    async def push(name: str, number: int, **options: object) -> AdapterStatus:
        return await client.push_adapter(name, telltale_adapter(model, number), config=CONFIG, **options)  # type: ignore[arg-type]

    async def sample(adapter: str | None, count: int = 1, max_tokens: int = 4, **options: object) -> list[Rollout]:
        return await client.generate_batch(
            [PROMPT] * count,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            adapter=adapter,
            **options,  # type: ignore[call-overload]
        )

    async def require(adapter: str, version: int, number: int, count: int = 8, **options: object) -> set[str]:
        """Check rollouts of an adapter, and return the replicas that sampled them."""
        rollouts = await sample(adapter, count, **options)
        for rollout in rollouts:
            assert_made_by(rollout.completions[0], adapter.partition("@")[0], version, number)
        return {rollout.replica_id for rollout in rollouts}

    closed = {each.replica_id: each.update for each in (await client.fleet()).replicas}
    first = await push("run-a", OF_A)
    assert len(first.replicas) == 2
    await push("run-b", OF_B)
    await asyncio.gather(require("run-a", 1, OF_A), require("run-b", 1, OF_B))
    assert_made_by((await sample(None))[0].completions[0], None, None, 1)

    # a version that is pushed under load is live at once, and running rollouts keep theirs
    long = asyncio.create_task(sample("run-a", 8, LONG))
    await _until(client, lambda adapters: adapters[0].running == 8)
    second = await push("run-a", NEXT_OF_A)
    assert second.version == 2 and not long.done()
    await require("run-a", 2, NEXT_OF_A, min_adapter_version=2)
    await require("run-a@1", 1, OF_A)
    for rollout in await long:
        assert_made_by(rollout.completions[0], "run-a", 1, OF_A)
    assert closed == {each.replica_id: each.update for each in (await client.fleet()).replicas}  # no engine was closed

    # a replica that is lost is replaced, and its rollouts continue under the version that they began with
    long = asyncio.create_task(sample("run-a@1", 8, LONG))
    await _until(client, lambda adapters: sum(each.running for each in adapters) == 8)
    known = {each.replica_id for each in (await client.fleet()).replicas}
    engines = [each for each in running[1].children(recursive=True) if "ServeReplica:rollout:engine" in _title(each)]
    engines[0].kill()
    await push("run-b", OF_A, wait="none")  # while one replica is lost
    for rollout in await long:
        assert_made_by(rollout.completions[0], "run-a", 1, OF_A)
    await _until_two_serve(client, known)
    await _until(client, lambda adapters: all(len(each.replicas) == 2 for each in adapters))
    sampled_by = set[str]()
    async with asyncio.timeout(60):
        while len(sampled_by) < 2:
            sampled_by |= await require("run-b", 2, OF_A, 32, min_adapter_version=2)
            sampled_by |= await require("run-a", 2, NEXT_OF_A, 32)

    await _check_other_routes(running[0], model, tmp_path)
    await client.remove_adapter("run-a")
    with pytest.raises(NotFound, match="there is no adapter 'run-a'"):
        await sample("run-a")


@pytest.mark.timeout(3600)
async def test_a_thousand_versions_under_load_leave_nothing_behind(
    running: tuple[str, psutil.Process], client: RolloutClient, model: Path, tmp_path: Path
) -> None:
    newest, is_over = 0, asyncio.Event()

    async def push(version: int) -> None:
        nonlocal newest
        tensors = telltale_of_all_layers(model, _number(version))
        pushed = await client.push_adapter("run-a", tensors, config=FULL_CONFIG)
        assert pushed.version == version and len(pushed.replicas) == 2
        newest = version

    async def sample() -> int:
        rollouts = 0
        while not is_over.is_set():
            wanted = newest
            rollout = await client.generate(
                PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, adapter="run-a", min_adapter_version=wanted
            )
            [completion], rollouts = rollout.completions, rollouts + 1
            version = completion.spans[0].adapter_version
            assert version is not None and version >= wanted
            assert_made_by(completion, "run-a", version, _number(version))
        return rollouts

    await push(1)
    async with asyncio.TaskGroup() as group:
        sampling = [group.create_task(sample()) for _ in range(8)]
        for version in range(2, VERSIONS + 1):
            await push(version)
            if version == VERSIONS // 10:
                before = _usage(running[1])
        is_over.set()
    assert sum(task.result() for task in sampling) > VERSIONS
    assert [each.version for each in await client.adapters()][-1] == VERSIONS
    assert len(list((tmp_path / "log/adapters").glob("*/*"))) <= MAX_LIVE
    assert list((tmp_path / "log/adapters.staging").glob("*")) == []
    after = _usage(running[1])
    stayed = before.keys() & after.keys()  # Ray ends idle workers
    assert len([process for process in stayed if "engine" in process or "VLLM" in process]) >= 2, stayed
    grown = {
        process: [new - old for old, new in zip(before[process], after[process], strict=True)] for process in stayed
    }
    assert all(files < VERSIONS // 20 and nbytes < MORE_BYTES for files, nbytes in grown.values()), grown


def _number(version: int) -> int:
    """Return the number whose token a version emits; never that of the base, which emits the token of 1."""
    return 2 + version % (CYCLE - 2)


def _usage(service: psutil.Process) -> dict[str, tuple[int, int]]:
    """Return the open files and the bytes in memory of each process of the service, by its title and id."""
    return {
        f"{_title(process)} {process.pid}": (process.num_fds(), process.memory_info().rss)
        for process in service.children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    }


async def _check_other_routes(url: str, model: Path, tmp_path: Path) -> None:
    """Load, use and unload an adapter as other projects' clients do."""
    folder = save_adapter(tmp_path / "checkpoint-1", telltale_adapter(model, OF_B), **CONFIG)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"lora_name": "trl-v1", "lora_path": str(folder), "load_inplace": False}
        await http.post("/pause", params={"mode": "keep"})  # as TRL 1.16 does
        reply = await http.post("/v1/load_lora_adapter", json=body)
        await http.post("/resume")
        assert reply.status_code == 200 and reply.text == "Success: LoRA adapter 'trl-v1' added successfully."
        names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
        assert {"run-a", "run-b", "trl-v1"} < set(names)
        asked = {"model": "trl-v1", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        reply = await http.post("/v1/completions", json=asked | {"return_token_ids": True})
        assert reply.json()["model"] == "trl-v1"
        assert set(reply.json()["choices"][0]["token_ids"]) == {token_of(OF_B)}, reply.text
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        reply = await http.post("/v1/chat/completions", json=chat | {"model": "run-b@2", "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        assert reply.json()["model"] == "run-b@2" and choice["weight_versions"][0]["adapter_version"] == 2
        assert set(choice["token_ids"]) == {token_of(OF_A)}
        info = (await http.get("/server_info", params={"config_format": "json"})).json()
        assert info["vllm_config"]["lora_config"]["max_lora_rank"] == 8
        reply = await http.post("/v1/chat/completions", json=chat | {"model": "unknown"})
        assert reply.status_code == 404
        reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": "trl-v1"})
        assert reply.status_code == 200, reply.text


async def _until(client: RolloutClient, reached: Callable[[list[AdapterStatus]], bool]) -> None:
    async with asyncio.timeout(120):
        while not reached(await client.adapters()):
            await asyncio.sleep(0.1)


async def _until_two_serve(client: RolloutClient, before: set[str] | None = None) -> None:
    """Wait until two replicas are ready, of which not both are in ``before``."""
    async with asyncio.timeout(300):
        while True:
            ready = {each.replica_id for each in (await client.fleet()).replicas if each.state == "ready"}
            if len(ready) == 2 and ready != before:
                return
            await asyncio.sleep(0.2)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
