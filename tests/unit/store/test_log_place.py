"""Where the log lies if ``weights.root`` is ``auto``."""

import os
import resource
import shutil
import stat
from collections import namedtuple
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import LogLocked
from rollout_service.store import log_place as module
from rollout_service.store.durable_io import WriterLock
from rollout_service.store.log import log_at
from rollout_service.store.log_place import bytes_in_memory, claim_log_place, log_place
from tests.support.models import make_model

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def config(tmp_path: Path) -> ServiceConfig:
    model = make_model(tmp_path / "model", "qwen3")
    weights = {"root": "auto", "disk_root": tmp_path / "out" / "weights"}
    return ServiceConfig.model_validate({"model": {"path": model}, "weights": weights})


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def begin(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "LATEST").write_text("{}")


def test_enough_room_puts_the_log_in_private_memory(config, shm):
    looked = log_place(config, shm)
    assert list(shm.iterdir()) == [] and not config.weights.disk_root_here().exists()
    place = claim_log_place(config, shm)
    assert place == looked and place.root.is_relative_to(shm) and "can be taken" in place.why
    for folder in (place.root, place.root.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert log_at(config.weights.disk_root_here()) == place.root


def test_too_little_room_puts_the_log_on_the_disk_where_it_stays(config, shm, tmp_path, monkeypatch):
    disk, needed = config.weights.disk_root_here(), bytes_in_memory(config)
    assert claim_log_place(config, tmp_path / "none").root == disk
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(needed, 1, needed - 1))
    place = claim_log_place(config, shm)
    assert place.root == disk and "on a disk" in place.why
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(needed, 0, needed))
    assert log_place(config, shm).root.is_relative_to(shm)
    begin(disk)
    place = claim_log_place(config, shm)
    assert place.root == disk and "continued" in place.why


def test_a_log_in_memory_is_continued_without_room(config, shm, monkeypatch):
    place = claim_log_place(config, shm)
    begin(place.root)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(1, 1, 0))
    assert claim_log_place(config, shm).root == place.root


def test_removing_disk_root_removes_the_log_in_memory_unless_it_is_written(config, shm):
    place = claim_log_place(config, shm)
    begin(place.root)
    shutil.rmtree(config.weights.disk_root_here())
    with WriterLock(place.root).acquire(0), pytest.raises(LogLocked):
        claim_log_place(config, shm)
    assert (place.root / "LATEST").exists()
    again = claim_log_place(config, shm)
    assert again.root == place.root and list(again.root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_not_used(config, shm):
    shm.chmod(0o1777)
    theirs = shm / f"rollout-service-{os.geteuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    place = claim_log_place(config, shm)
    assert place.root == config.weights.disk_root_here() and "belongs to user 12345" in place.why


def test_a_named_root_is_taken_as_it_is(config, shm, tmp_path):
    weights = config.weights.model_copy(update={"root": tmp_path / "named"})
    assert claim_log_place(config.model_copy(update={"weights": weights}), shm).root == tmp_path / "named"
    assert list(shm.iterdir()) == []


def test_a_full_disk_names_no_log_in_disk_root(config, shm):
    disk, limits = config.weights.disk_root_here(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            claim_log_place(config, shm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log_at(disk) == disk
    place = claim_log_place(config, shm)
    assert log_at(disk) == place.root


def test_a_log_on_the_disk_is_found_beside_the_name_of_one_that_memory_lost(config, shm, tmp_path):
    disk, place = config.weights.disk_root_here(), claim_log_place(config, shm)
    begin(place.root)
    shutil.rmtree(shm)  # the host has restarted, and has less memory now
    begin(claim_log_place(config, tmp_path / "none").root)
    assert log_at(disk) == log_place(config, tmp_path / "none").root == disk


def test_a_renamed_disk_root_says_where_its_log_stays(config, shm, tmp_path, caplog):
    before = claim_log_place(config, shm).root
    begin(before)
    renamed = config.weights.disk_root_here().rename(tmp_path / "renamed")
    weights = config.weights.model_copy(update={"disk_root": renamed})
    place = claim_log_place(config.model_copy(update={"weights": weights}), shm)
    said = f"{renamed} was renamed or copied, and its log in memory stays at {before}, unused"
    assert place.root != before and caplog.text.count(said) == 1
    claim_log_place(config.model_copy(update={"weights": weights}), shm)
    assert caplog.text.count(said) == 1


def test_a_copy_of_disk_root_names_its_own_log(config, shm, tmp_path):
    begin(claim_log_place(config, shm).root)
    copy = shutil.copytree(config.weights.disk_root_here(), tmp_path / "copy")
    weights = config.weights.model_copy(update={"disk_root": copy})
    place = claim_log_place(config.model_copy(update={"weights": weights}), shm)
    assert log_at(copy) == place.root != log_at(config.weights.disk_root_here())
