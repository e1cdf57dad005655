"""A version lies in the staging area as it lies in its files, or the reading says why not."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from rollout_service.engine.staging_area import StagingArea
from rollout_service.weights.log import WeightLog
from tests.unit.weights.versions import FIRST, SECOND, commit


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path)
    for version in (1, 2):
        commit(log, version)
    return log


@pytest.fixture
def area() -> StagingArea:
    return StagingArea("host", torch.nn.Linear(8, 8), torch.device("cpu"))


def read(area: StagingArea, folder: Path) -> None:
    area.start(folder)
    while not area.is_done():
        time.sleep(0.001)


def test_the_tensors_are_those_of_the_files(log: WeightLog, area: StagingArea) -> None:
    read(area, log.folder(2))
    staged = area.staged(log.folder(2))
    assert staged is not None and staged.manifest == log.manifest(2)
    tensors = dict(area.tensors(staged))
    assert tensors.keys() == {FIRST, SECOND}
    assert tensors[FIRST].shape == (4, 5) and tensors[FIRST].dtype == torch.float32
    assert bytes(tensors[FIRST].view(torch.uint8).flatten().tolist()) == bytes([2]) * 80
    assert bytes(tensors[SECOND].view(torch.uint8).tolist()) == bytes(range(12))


def test_only_the_last_version_is_there(log: WeightLog, area: StagingArea) -> None:
    for version in (1, 2):
        read(area, log.folder(version))
    assert area.staged(log.folder(1)) is None and area.staged(log.folder(2)) is not None


def test_versions_of_equal_tensors_have_one_layout_and_others_another(log: WeightLog, area: StagingArea) -> None:
    layouts = []
    for version in (1, 2):
        read(area, log.folder(version))
        staged = area.staged(log.folder(version))
        assert staged is not None
        layouts.append(staged.layout)
    other = staged.manifest.model_copy(update={"tensors": staged.manifest.tensors[:1]})
    (log.folder(2) / "manifest.json").write_text(other.model_dump_json())
    read(area, log.folder(2))
    staged = area.staged(log.folder(2))
    assert staged is not None
    assert layouts[0] == layouts[1] != staged.layout


def test_a_file_that_is_too_short_is_an_error_that_names_it(log: WeightLog, area: StagingArea) -> None:
    (file,) = log.folder(1).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{file.name} ends 5 bytes early"):
        read(area, log.folder(1))
    assert area.staged(log.folder(1)) is None


def test_after_a_failure_the_next_version_is_staged(log: WeightLog, area: StagingArea) -> None:
    shutil.rmtree(log.folder(1))
    with pytest.raises(FileNotFoundError):
        read(area, log.folder(1))
    read(area, log.folder(2))
    assert area.staged(log.folder(2)) is not None


def test_a_version_larger_than_the_area_is_refused_with_both_sizes(
    log: WeightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_service.engine.staging_area._SLACK_BYTES", 16)
    area = StagingArea("host", torch.nn.Linear(1, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"256 bytes, and the staging area 24"):
        read(area, log.folder(1))
