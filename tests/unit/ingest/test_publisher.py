"""Versions that a service publishes in a store, and that another one follows."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from rollout_service.errors import NotReady
from rollout_service.ingest import publisher
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.delta_folder import is_delta
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import RollBack
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of, folder_weights, started


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def stepped(weights: Weights, number: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step, which changes the last bit of few elements."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values():
        tensor.view(-1).view(torch.int16)[number::50] ^= 1
    return found


@asynccontextmanager
async def running(model: Path, root: Path, quant: str = "fp8_block", **weights: object) -> AsyncIterator[Ingest]:
    config = config_of(model, root, weights={"poll_s": 0.02, **weights}, quant={"weights": quant})
    async with started(config.resolved()) as ingest:
        yield ingest


@asynccontextmanager
async def both(model: Path, store: Path, quant: str = "fp8_block") -> AsyncIterator[tuple[Ingest, Ingest]]:
    """A service that publishes, and one that follows it."""
    async with (
        running(model, store.parent / "log", quant, publish=str(store)) as leader,
        running(model, store.parent / "follower", quant, watch=str(store), source_roots=[store]) as follower,
    ):
        yield leader, follower


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    while not await is_true():
        await asyncio.sleep(0.01)


async def require_same(leader: Ingest, follower: Ingest) -> None:
    """Wait until the follower has the leader's newest version, and compare both."""
    version = (await leader.fleet()).latest_version

    async def is_there() -> bool:
        return (await follower.fleet()).latest_version == version

    await until(is_there)
    assert (await follower.status(version)).digest == (await leader.status(version)).digest
    assert await follower.tensor_digests() == await leader.tensor_digests()


def published(store: Path) -> dict[int, bool]:
    """Return the versions in the store, each with True if it is whole."""
    return {int(path.name[-6:]): not is_delta(path) for path in sorted(store.iterdir())}


@pytest.mark.parametrize(
    ("kind", "quant"), [("model", "fp8_channel"), ("moe_model", "fp8_block"), ("tied_model", "none")]
)
async def test_a_follower_has_the_same_digests(request, store, kind, quant):
    model: Path = request.getfixturevalue(kind)
    weights = folder_weights(model)
    async with both(model, store, quant) as (leader, follower):
        for version in (1, 2, 3):
            weights = stepped(weights, version)
            await Trainer(leader).push(version, weights)
            await require_same(leader, follower)
        await leader.roll_back(RollBack(to=2))
        await require_same(leader, follower)
        assert published(store) == {1: True, 2: False, 3: False, 4: False}


async def test_kv_scales_go_with_their_version(model, store, weights):
    layers = ServedModel.load(model).attention
    scales = {f"{layer}.{x}_scale": 0.1 for layer in layers for x in "qkv"}
    async with both(model, store) as (leader, follower):
        await Trainer(leader).push(1, stepped(weights, 1), scales)
        await require_same(leader, follower)
        assert (await follower.status(1)).kv_scales_from == "trainer"


async def test_other_weights_are_published_whole(model, store, weights):
    async with both(model, store) as (leader, follower):
        for version in (1, 2):
            torch.manual_seed(version)
            await Trainer(leader).push(version, {name: torch.randn_like(tensor) for name, tensor in weights.items()})
            await require_same(leader, follower)
        assert published(store) == {1: True, 2: True}


async def test_versions_before_two_whole_ones_are_removed(model, store, weights, monkeypatch):
    monkeypatch.setattr(publisher, "MAX_LINKS", 1)
    (store / "weight_v000001").mkdir()  # a process was killed before it wrote the index
    async with both(model, store) as (leader, follower):
        for version in range(2, 8):
            weights = stepped(weights, version)
            await Trainer(leader).push(version, weights)
            await require_same(leader, follower)
        assert published(store) == {4: True, 5: False, 6: True, 7: False}
        async with running(model, store.parent / "new", watch=str(store), source_roots=[store]) as late:
            await require_same(leader, late)


async def test_a_restart_writes_nothing_again_and_a_whole_version_next(model, store, weights):
    for version in (1, 2):
        async with both(model, store) as (leader, follower):
            if version == 2:
                before = (store / "weight_v000001").stat().st_ino
                publisher.Publisher(leader._log, str(store), 1.0).publish()
                assert (store / "weight_v000001").stat().st_ino == before
            await Trainer(leader).push(version, changed(weights, 0.1 * version))
            await require_same(leader, follower)
    assert published(store) == {1: True, 2: True}
    assert not list(store.rglob("*.tmp"))


async def test_an_earlier_process_still_writes_the_same_version(model, store, weights, monkeypatch):
    half_written, go_on = threading.Event(), threading.Event()
    pipe_file = LocalFileSystem.pipe_file

    def slow(files: LocalFileSystem, path: str, value: bytes) -> None:
        if threading.current_thread() is not writing or not path.endswith(".tmp"):
            return pipe_file(files, path, value)
        with open(path, "wb", buffering=0) as file:
            file.write(value[:100])
            half_written.set()
            go_on.wait()
            file.write(value[100:])

    async with running(model, store.parent / "log") as leader:
        earlier, later = (publisher.Publisher(leader._log, str(store), 1.0) for _ in range(2))
        await Trainer(leader).push(1, stepped(weights, 1))
        earlier.publish()
        await Trainer(leader).push(2, stepped(weights, 2))
        writing = threading.Thread(target=earlier.publish)
        monkeypatch.setattr(LocalFileSystem, "pipe_file", slow)
        writing.start()
        await asyncio.to_thread(half_written.wait)
        later.publish()
        for is_whole in (True, False):  # before and after the earlier process has written its index
            assert published(store) == {1: True, 2: is_whole}
            async with running(model, store.parent / "follower", watch=str(store), source_roots=[store]) as follower:
                await require_same(leader, follower)
            shutil.rmtree(store.parent / "follower")
            go_on.set()
            await asyncio.to_thread(writing.join)


async def test_a_damaged_base_makes_the_next_version_whole(model, store, weights):
    async with both(model, store) as (leader, follower):
        await Trainer(leader).push(1, stepped(weights, 1))
        await require_same(leader, follower)
        file = next((store.parent / "log" / "1").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-2000:] = bytes(2000)
        file.write_bytes(data)
        await Trainer(leader).push(2, stepped(stepped(weights, 1), 2))
        await require_same(leader, follower)
        assert published(store) == {1: True, 2: True}


async def problem(leader: Ingest) -> str:
    """Wait until the newest version cannot be published; return the reason."""
    assert leader.publisher is not None
    while leader.publisher.problem is None:
        await asyncio.sleep(0.01)
    return str(leader.publisher.problem)


async def test_a_store_of_another_run_is_refused(model, store, weights):
    async with both(model, store) as (leader, follower):
        await Trainer(leader).push(7, stepped(weights, 1))
        await require_same(leader, follower)
    async with running(model, store.parent / "other", publish=str(store)) as other:
        await Trainer(other).push(1, stepped(weights, 2))
        assert "has version 7, and the log version 1 with the digest" in await problem(other)
    assert published(store) == {7: True}


async def test_a_trainer_s_store_is_left_alone(model, store, weights):
    (store / "weight_v000001").mkdir()
    (store / "weight_v000001" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    async with running(model, store.parent / "log", publish=str(store)) as leader:
        await Trainer(leader).push(2, stepped(weights, 1))
        assert "has version 1, and the log version 2 with the digest" in await problem(leader)
    assert [path.name for path in store.iterdir()] == ["weight_v000001"]


async def test_an_unreachable_store_is_tried_again(model, store, weights):
    store.rmdir()
    store.write_text("in the way")
    async with running(model, store.parent / "log", publish=str(store)) as leader:
        await Trainer(leader).push(1, stepped(weights, 1))
        assert "cannot be reached" in await problem(leader)
        leader.check_tasks()
        store.unlink()
        async with running(model, store.parent / "follower", watch=str(store), source_roots=[store]) as follower:
            await require_same(leader, follower)


async def test_versions_are_dropped_while_the_store_is_away(model, store, weights):
    away = store.with_name("away")
    async with running(model, store.parent / "log") as leader:
        own = leader.publisher = publisher.Publisher(leader._log, str(store), 1.0)
        weights = stepped(weights, 1)
        await Trainer(leader).push(1, weights)
        own.publish()
        store.rename(away)
        store.write_text("in the way")
        for version in range(2, 6):
            weights = stepped(weights, version)
            await Trainer(leader).push(version, weights)
            with pytest.raises(NotReady, match="cannot be reached"):
                own.publish()
        assert leader._log.versions() == [1, 4, 5]
        store.unlink()
        away.rename(store)
        own.publish()
        assert published(store) == {1: True, 5: False} and own.needed == {5}


async def test_a_damaged_whole_version_is_not_followed(model, store, weights):
    async with running(model, store.parent / "log", publish=str(store)) as leader:
        await Trainer(leader).push(1, stepped(weights, 1))
        index = store / "weight_v000001" / "model.safetensors.index.json"
        while not index.is_file():
            await asyncio.sleep(0.01)
        good = shutil.copytree(index.parent, store.parent / "good")
        file = next(index.parent.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        async with running(model, store.parent / "follower", watch=str(store), source_roots=[store]) as follower:
            while follower.watcher.problem is None:
                await asyncio.sleep(0.01)
            assert "has the checksum" in str(follower.watcher.problem)
            shutil.rmtree(index.parent)
            good.rename(index.parent)
            await require_same(leader, follower)
