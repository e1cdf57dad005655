"""LoRA adapters that are damaged, too many or pushed by two at once, and a replica that dies between load and publish.

Each adapter's tokens tell which one made them.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.faults.ground import REPLICAS, WAIT_S, Case, Ground, below, ground, processes, until
from benchmarks.faults.inputs import NotRefused, refused
from benchmarks.faults.storage import flip
from rollout_service.client import RolloutClient
from rollout_service.client._adapters import _files_of
from rollout_service.errors import DigestMismatch, InvalidManifest, VersionConflict
from rollout_service.protocol.adapters import AdapterStatus, AdapterVersion, BeginAdapter
from rollout_service.store.adapters import AdapterStore
from tests.support.adapters import CONFIG, telltale_of_all_layers
from tests.support.moments import MomentMissed, has_mapped, resume, stop_at, wait_for
from tests.support.telltale import assert_made_by

NAME = "run-a"
MAX_LIVE = 4
FIRST = 20  # the number whose token the first version of an adapter emits
ATTEMPTS = 10  # versions pushed until a moment is hit
MOMENT_S, LOAD_S = 3.0, 10.0
LONG, ROLLOUTS = 250, 4


def adapter_cases() -> Iterator[Case]:
    yield Case("kill replica, an adapter is loaded and not published", before_publication, ground=adapted)
    yield Case("a damaged upload of an adapter", damaged_uploads, ground=adapted)
    yield Case("a flipped byte in a file of an adapter", flipped_file, ground=adapted)
    yield Case("two trainers push one adapter at once", two_trainers, ground=adapted)
    yield Case("more adapters than fit", too_many, ground=adapted)


def adapted(folder: Path, **settings: dict[str, Any]) -> AbstractAsyncContextManager[Ground]:
    settings["engine"] = settings.get("engine", {}) | {"adapters": {"max_live": MAX_LIVE, "max_rank": 8}}
    return ground(folder, REPLICAS, **settings)


def tensors(ground: Ground, number: int) -> dict[str, torch.Tensor]:
    """Return the adapter that emits the token of ``number``."""
    return telltale_of_all_layers(ground.service.config.model.path, number)


async def push(ground: Ground, number: int, name: str = NAME, **options: Any) -> AdapterStatus:
    """Push the adapter that emits the token of ``number`` as the next version."""
    return await ground.client.push_adapter(name, tensors(ground, number), config=CONFIG, **options)


async def require(
    ground: Ground, version: int, number: int, name: str = NAME, max_tokens: int = 8, exact: bool = False
) -> None:
    """Sample rollouts of an adapter. Raises AssertionError for a token of another version."""
    rollouts = await ground.client.generate_batch(
        [[5, 6, 7 + each] for each in range(ROLLOUTS)],
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        adapter=f"{name}@{version}" if exact else name,
        min_adapter_version=None if exact else version,
    )
    for rollout in rollouts:
        assert_made_by(rollout.completions[0], name, version, number)


async def state(ground: Ground, adapter: AdapterVersion) -> AdapterStatus:
    """Return an adapter version and the replicas that hold it."""
    return next(each for each in await ground.client.adapters() if str(each) == str(adapter))


async def until_it_runs(ground: Ground, adapter: AdapterVersion) -> None:
    """Return once rollouts of an adapter version are running."""

    async def look() -> bool:
        return bool((await state(ground, adapter)).running)

    await until(look, f"{adapter} runs")


async def until_all_hold(ground: Ground, known: frozenset[str] = frozenset()) -> None:
    """Return once all replicas hold all adapters, one of them not in ``known``."""

    async def look() -> bool:
        adapters = await ground.client.adapters()
        return all(len(each.replicas) == ground.replicas and set(each.replicas) - known for each in adapters)

    await until(look, "all replicas hold all adapters")


async def remove_all(ground: Ground) -> None:
    """Remove all adapters, those of a case that failed, too."""
    for name in {each.name for each in await ground.client.adapters()}:
        await ground.client.remove_adapter(name)


async def before_publication(ground: Ground) -> None:
    """Kill a replica whose worker has loaded a version that the replica has not reported."""
    await remove_all(ground)
    newest = await push(ground, FIRST)
    for number in range(FIRST + 1, FIRST + 1 + ATTEMPTS):
        running = asyncio.create_task(require(ground, newest.version, number - 1, max_tokens=LONG, exact=True))
        await until_it_runs(ground, newest)
        known, replica = await ground.replica_ids(), random.choice(processes("replica"))
        pushing = asyncio.create_task(push(ground, number))
        is_hit = await asyncio.to_thread(strike, replica, AdapterStore(ground.log).folder(newest).parent, pushing)
        if is_hit:
            ground.killed("replica", replica, known)
        newest = await pushing
        await require(ground, newest.version, number)
        await running
        if is_hit:
            break
    else:
        raise MomentMissed(f"{ATTEMPTS} versions were pushed, and the moment was never seen")
    ground.note(f"the worker had loaded {newest}, and the replica had not reported it")
    await until_all_hold(ground, known)
    await require(ground, newest.version, number)


def strike(replica: psutil.Process, files: Path, pushing: "asyncio.Task[AdapterStatus]") -> bool:
    """Stop a replica when its worker reads a new adapter below ``files``, let the worker finish, and kill the replica.

    False: that was not seen, and nothing is killed.
    """
    worker, before = below(replica, "vllm worker"), len(list(files.iterdir()))
    if not wait_for(lambda: len(list(files.iterdir())) > before, WAIT_S):
        return False
    if not stop_at(replica, lambda: has_mapped(worker, files), MOMENT_S):
        return False
    try:
        is_loaded = wait_for(lambda: not has_mapped(worker, files), LOAD_S)
        if is_loaded and not pushing.done():
            replica.kill()
            return True
        return False
    finally:
        resume(replica)


async def damaged_uploads(ground: Ground) -> None:
    """A flipped byte, values that are not finite, matrices of another model: each is refused, and nothing changes."""
    await remove_all(ground)
    await push(ground, FIRST)
    good = tensors(ground, FIRST + 1)
    config, content = _files_of(good, CONFIG)
    begin = BeginAdapter(config=config, digest="0" * 32, nbytes=len(content))
    reply = await ground.send("POST", f"/v1/adapters/{NAME}", json=begin.model_dump(mode="json"))
    digest = reply.json()["digest"]
    await ground.send("PUT", f"/v1/adapters/{NAME}/uploads/{digest}/parts/0", content=content)
    with refused(DigestMismatch):
        await ground.send("POST", f"/v1/adapters/{NAME}/commit", json={"digest": digest})
    for damaged in (
        {name: tensor * float("nan") for name, tensor in good.items()},
        {name: tensor[:-1].contiguous() for name, tensor in good.items()},
        {name: tensor.int() for name, tensor in good.items()},
    ):
        with refused(InvalidManifest):
            await ground.client.push_adapter(NAME, damaged, config=CONFIG)
    await require(ground, 1, FIRST)
    pushed = await push(ground, FIRST + 1)
    await require(ground, pushed.version, FIRST + 1)


async def flipped_file(ground: Ground) -> None:
    """Damage the newest version's file and kill a replica: its successor must not serve it. A newer version heals."""
    await remove_all(ground)
    await push(ground, FIRST)
    damaged, known = await push(ground, FIRST + 1), await ground.replica_ids()
    flip(AdapterStore(ground.log).folder(damaged) / "adapter_model.safetensors")
    await ground.kill("replica")
    async with asyncio.timeout(WAIT_S):
        while not (errors := (await state(ground, damaged)).errors):
            await asyncio.sleep(0.2)
            await require(ground, 2, FIRST + 1)
    if errors.keys() & known:
        raise AssertionError(f"a replica lost what it had loaded: {errors}")
    await require(ground, 1, FIRST, exact=True)
    await require(ground, 2, FIRST + 1)
    ground.note(f"the successor said: {next(iter(errors.values()))}")
    pushed = await push(ground, FIRST + 2)
    await require(ground, pushed.version, FIRST + 2)


async def two_trainers(ground: Ground) -> None:
    """Two push different adapters as the same version of one name: one wins, on all replicas."""
    await remove_all(ground)
    async with RolloutClient(ground.service.url, token=ground.service.config.auth.secret()) as other:
        outcomes = await asyncio.gather(
            push(ground, FIRST, version=1),
            other.push_adapter(NAME, tensors(ground, FIRST + 1), config=CONFIG, version=1),
            return_exceptions=True,
        )
    won = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, AdapterStatus)]
    if len(won) != 1 or not isinstance(outcomes[1 - won[0]], VersionConflict):
        raise NotRefused(f"outcomes were {outcomes}")
    await require(ground, 1, FIRST + won[0])
    pushed = await push(ground, FIRST + 2)
    await require(ground, pushed.version, FIRST + 2)


async def too_many(ground: Ground) -> None:
    """Names beyond ``max_live`` are refused. A version without a free place waits for rollouts of older ones."""
    await remove_all(ground)
    for number in range(MAX_LIVE):
        await push(ground, FIRST + number, f"run-{number}")
    with refused(VersionConflict):
        await push(ground, FIRST, "one-more")
    first = (await ground.client.adapters())[0]
    running = asyncio.create_task(require(ground, 1, FIRST, first.name, LONG))
    await until_it_runs(ground, first)
    await push(ground, FIRST + MAX_LIVE, first.name)
    ground.note(f"a second version had no free place while {ROLLOUTS} rollouts of the first ran")
    await running
    await require(ground, 2, FIRST + MAX_LIVE, "run-0")
    for number in range(1, MAX_LIVE):
        await require(ground, 1, FIRST + number, f"run-{number}")
    await ground.client.remove_adapter("run-1")
    await push(ground, FIRST, "one-more")
    await require(ground, 1, FIRST, "one-more")
