"""The adapters that a replica holds: loading, publishing, removal, and failures. The engine records its calls."""

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.adapters import LoadedAdapter, ReplicaAdapters
from rollout_service.errors import InvalidManifest, NotReady, TooEarly
from rollout_service.protocol.adapters import TENSORS_FILE, AdapterVersion, WantedAdapter
from rollout_service.store import adapters as adapters_module
from rollout_service.store.adapters import ADAPTER_FILES, AdapterStore, digest_of

BASE = "digest of the base"


class Engine:
    """Records what is loaded and removed."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.refuses: set[str] = set()

    async def add_adapter(self, loaded: LoadedAdapter) -> None:
        if str(loaded.adapter) in self.refuses:
            raise InvalidManifest("vLLM cannot load it")
        self.held.append(str(loaded.adapter))

    async def remove_adapter(self, loaded: LoadedAdapter) -> None:
        self.held.remove(str(loaded.adapter))


class Replica:
    """A replica's adapters and the log that they come from."""

    def __init__(self, root: Path, max_live: int = 3) -> None:
        self.store, self.engine = AdapterStore(root), Engine()
        self.served: str | None = BASE
        self.adapters = ReplicaAdapters(self.engine, self.store, max_live, lambda: self.served)
        self.committed: list[AdapterVersion] = []

    def commit(self, name: str, version: int) -> AdapterVersion:
        adapter = committed(self.store, name, version)
        self.committed.append(adapter)
        return adapter

    async def settle(self) -> None:
        self.adapters.want(tuple(self.committed))
        await self.adapters.settle()

    def newest(self, name: str) -> str:
        with self.adapters.use(WantedAdapter(name=name)) as loaded:
            assert loaded is not None
            return str(loaded.adapter)


def committed(store: AdapterStore, name: str, version: int) -> AdapterVersion:
    """Write an adapter's files, whose content is its name and version."""
    staged = store.staging(f"{name}-{version}")
    staged.mkdir(parents=True)
    for file in ADAPTER_FILES:
        (staged / file).write_text(f"{file} of {name} {version}")
    save_file({"q_proj.lora_A": np.array([version])}, staged / TENSORS_FILE, {"name": name})
    adapter = AdapterVersion(
        name=name,
        version=version,
        digest=digest_of(staged),
        base_version=1,
        base_digest=BASE,
        rank=4,
        nbytes=1,
    )
    store.take_in(adapter, staged)
    return adapter


@pytest.fixture
async def replica(tmp_path: Path) -> Replica:
    """It holds version 1 of the adapter a."""
    replica = Replica(tmp_path)
    replica.commit("a", 1)
    await replica.settle()
    return replica


async def test_new_rollouts_take_the_newest_version(replica):
    with replica.adapters.use(WantedAdapter(name="a")) as before:
        replica.commit("a", 2)
        await replica.settle()
        assert replica.newest("a") == "a@2" and before is not None and before.adapter.version == 1
        assert [(each.version, each.running) for each in replica.adapters.status()] == [(1, 1), (2, 0)]
    with replica.adapters.use(WantedAdapter(name="a", exact_version=1)) as exact:
        assert exact == before


async def test_an_unwanted_version_stays_until_its_rollouts_end(replica):
    with replica.adapters.use(WantedAdapter(name="a")):
        replica.committed = []
        await replica.settle()
        assert replica.engine.held == ["a@1"]
        with pytest.raises(TooEarly, match="no adapter a is held here"):
            replica.newest("a")
        with replica.adapters.use(WantedAdapter(name="a", exact_version=1)):  # an interrupted completion continues
            pass
    await replica.settle()
    assert replica.engine.held == [] and replica.adapters.status() == ()


async def test_a_version_that_a_rollout_takes_while_another_is_removed_stays(tmp_path, monkeypatch):
    replica = Replica(tmp_path)
    remove, removing, may_end = replica.engine.remove_adapter, asyncio.Event(), asyncio.Event()

    async def slowly(loaded: LoadedAdapter) -> None:
        removing.set()
        await may_end.wait()
        await remove(loaded)

    monkeypatch.setattr(replica.engine, "remove_adapter", slowly)
    for name in ("a", "b", "c"):
        replica.commit(name, 1)
    await replica.settle()
    again = replica.committed.pop()
    replica.committed.clear()
    settling = asyncio.create_task(replica.settle())
    await removing.wait()
    with replica.adapters.use(WantedAdapter(name="b", exact_version=1)):  # an interrupted completion continues
        replica.adapters.want((again,))
        may_end.set()
        await settling
        assert replica.engine.held == ["b@1", "c@1"]
        assert [(each.name, each.running) for each in replica.adapters.status()] == [("b", 1), ("c", 0)]


async def test_a_version_waits_for_a_place_that_rollouts_hold(tmp_path):
    replica = Replica(tmp_path, max_live=1)
    replica.commit("a", 1)
    await replica.settle()
    with replica.adapters.use(WantedAdapter(name="a")):
        replica.committed = []
        replica.commit("a", 2)
        await replica.settle()
        assert replica.engine.held == ["a@1"]
    following = aiter(replica.adapters.follow())  # the end of the rollout wakes it
    await anext(following)
    assert replica.engine.held == ["a@2"]


async def test_a_version_that_cannot_be_loaded_leaves_the_one_before(replica):
    damaged = replica.commit("a", 2)
    (replica.store.folder(damaged) / TENSORS_FILE).write_text("flipped")
    replica.engine.refuses = {"a@3"}
    replica.commit("a", 3)
    await replica.settle()
    errors = {each.version: each.error for each in replica.adapters.status()}
    assert errors[1] is None and "hashes to" in str(errors[2]) and errors[3] == "vLLM cannot load it"
    assert replica.newest("a") == "a@1"


async def test_files_that_cannot_be_read_once_are_no_failure(tmp_path, monkeypatch):
    replica = Replica(tmp_path)
    adapter = replica.commit("a", 1)

    def verify(self: AdapterStore, adapter: AdapterVersion) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(AdapterStore, "verify", verify)
        await replica.settle()
        assert replica.adapters.status() == ()
    monkeypatch.setattr(AdapterStore, "verify", verify)
    await replica.settle()
    assert [str(each.error) for each in replica.adapters.status()] == ["[Errno 5] Input/output error"]
    replica.committed.remove(adapter)
    monkeypatch.undo()
    replica.commit("a", 2)
    await replica.settle()
    assert replica.newest("a") == "a@2"


async def test_copies_that_another_replica_removes_are_no_error(tmp_path, monkeypatch):
    store = AdapterStore(tmp_path)
    adapter = committed(store, "a", 1)

    def is_unlocked(folder: Path) -> bool:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))

    monkeypatch.setattr(adapters_module, "is_unlocked", is_unlocked)
    store.sweep(())
    assert store.folder(adapter).is_dir()  # the other replica removes it


async def test_a_sleeping_replica_loads_nothing_and_takes_requests_and_an_awake_one_its_own_base(replica):
    replica.served = None
    replica.commit("a", 2)
    await replica.settle()
    assert replica.engine.held == ["a@1"] and replica.newest("a") == "a@1"
    waiting = asyncio.create_task(replica.adapters.wait_for(WantedAdapter(name="a", min_version=2), 30))
    assert not await replica.adapters.wait_for(WantedAdapter(name="a", min_version=2), 0)
    replica.served = BASE
    await replica.settle()
    assert await waiting and replica.newest("a") == "a@2"
    replica.served = "another"
    with pytest.raises(TooEarly):
        replica.newest("a")


class Core:
    """Stands for vLLM's engine core: the first load of an adapter ends when a test lets it."""

    errored = is_paused = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loading, self.may_end = asyncio.Event(), asyncio.Event()

    async def add_lora(self, request: object) -> None:
        self.loading.set()
        await self.may_end.wait()
        self.calls.append("add_lora")

    async def reset_prefix_cache(self, **_: bool) -> None:
        pass

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
        self.calls.append(method)
        answers = {"adapter_targets": ["q_proj"], "drop_memory": 1, "missing_memory": (0, 0)}
        return [answers.get(method)]


async def test_an_adapter_is_loaded_before_memory_is_released_or_when_it_is_back(tmp_path, monkeypatch):
    replica, core = Replica(tmp_path), Core()
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *_, **__: core)
    engine = EngineAdapter(SimpleNamespace(additional_config={}))
    replica.adapters = ReplicaAdapters(engine, replica.store, 3, lambda: BASE)
    replica.commit("a", 1)
    settling = asyncio.create_task(replica.settle())
    await core.loading.wait()
    sleeping = asyncio.create_task(engine.sleep())
    for _ in range(20):  # it goes as far as it can
        await asyncio.sleep(0)
    core.may_end.set()
    await asyncio.gather(settling, sleeping)
    assert core.calls == ["adapter_targets", "add_lora", "drop_memory"]
    replica.commit("a", 2)
    await replica.settle()
    assert replica.newest("a") == "a@1" and [each.error for each in replica.adapters.status()] == [None]
    await engine.wake_up()
    await replica.settle()
    assert replica.newest("a") == "a@2"


class IngestOf:
    """Gives the files of a log in pieces."""

    def __init__(self, store: AdapterStore) -> None:
        self.store, self.is_away = store, False

    async def adapter_file(self, adapter: AdapterVersion, file: str, offset: int) -> bytes:
        if self.is_away:
            raise NotReady("the ingest is being replaced")
        return (self.store.folder(adapter) / file).read_bytes()[offset : offset + 5]


async def test_a_node_without_the_log_fetches_copies_and_drops_them(tmp_path):
    log = Replica(tmp_path / "log")
    first, second = log.commit("a", 1), log.commit("a", 2)

    ingest, copies = IngestOf(log.store), AdapterStore(tmp_path / "copies")
    ingest.is_away = True
    adapters = ReplicaAdapters(Engine(), copies, 3, lambda: BASE, ingest)
    adapters.want((first,))
    await adapters.settle()
    assert [each.error for each in adapters.status()] == ["the ingest is being replaced"]
    ingest.is_away = False
    adapters.want((second,))
    await adapters.settle()
    copies.verify(second)
    adapters.want(())
    await adapters.settle()
    assert not copies.folder(second).exists()


@pytest.mark.parametrize("is_log_sound", [True, False])
async def test_a_damaged_copy_is_fetched_again(tmp_path, is_log_sound):
    log = Replica(tmp_path / "log")
    adapter = log.commit("a", 1)
    copies = AdapterStore(tmp_path / "copies")
    copies.add_copy(adapter, {file: (log.store.folder(adapter) / file).read_bytes() for file in ADAPTER_FILES})
    damaged = [copies] if is_log_sound else [copies, log.store]
    for store in damaged:
        (store.folder(adapter) / TENSORS_FILE).write_bytes(b"damaged")
    adapters = ReplicaAdapters(Engine(), copies, 3, lambda: BASE, IngestOf(log.store))
    adapters.want((adapter,))
    await adapters.settle()
    assert [each.error is None for each in adapters.status()] == [is_log_sound]
    if is_log_sound:
        copies.verify(adapter)
