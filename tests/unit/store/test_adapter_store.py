"""Folders of adapter versions: durable in the log, and shared by the replicas of a node."""

from pathlib import Path

import pytest

from rollout_service.protocol.adapters import AdapterVersion
from rollout_service.store import adapters as module
from rollout_service.store.adapters import ADAPTER_FILES, AdapterStore, adapter_digest
from rollout_service.store.durable_io import is_unlocked

FILES = dict(zip(ADAPTER_FILES, (b"{}", b"tensors"), strict=True))
ADAPTER = AdapterVersion(
    name="run-a",
    version=3,
    digest=adapter_digest(b"{}", module.xxhash.xxh3_128_hexdigest(b"tensors")),
    base_version=0,
    base_digest="0" * 32,
    rank=8,
    nbytes=7,
)


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path)


def test_every_new_folder_of_an_adapter_is_synced(store, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(module, "sync_folder", synced.append)
    store.add_copy(ADAPTER, FILES)
    folder = store.folder(ADAPTER)
    assert synced[-2:] == [folder.parent, folder.parent.parent]


def test_a_copy_that_another_replica_holds_is_not_replaced(store, tmp_path, monkeypatch):
    other, sync_folder = AdapterStore(tmp_path), module.sync_folder

    def meanwhile(folder: Path) -> None:
        monkeypatch.setattr(module, "sync_folder", sync_folder)
        other.add_copy(ADAPTER, FILES)
        other.hold(ADAPTER)

    monkeypatch.setattr(module, "sync_folder", meanwhile)
    store.add_copy(ADAPTER, FILES)
    assert not is_unlocked(store.folder(ADAPTER))
    store.verify(ADAPTER)
    assert not list((tmp_path / "adapters.staging").iterdir())
