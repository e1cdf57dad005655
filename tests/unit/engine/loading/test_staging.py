"""What one worker says of a version that it was told to stage."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.engine.loading import staging
from rollout_service.engine.loading.staging import CannotStage, Stager, StagingBuffer
from rollout_service.engine.loading.staging_calls import StageAnswer
from rollout_service.store.log import WeightLog
from tests.unit.store.versions import FIRST, commit, flip_a_byte


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path)
    commit(log, 1)
    return log


def area() -> StagingBuffer:
    return StagingBuffer("memory", torch.nn.Linear(1, 1), torch.device("cpu"))


def staged(stager: Stager, log: WeightLog, digest: str | None = None) -> StageAnswer:
    return stager.stage(log.folder(1), digest, None)


def corrupt_of(answer: StageAnswer) -> tuple[str, dict[str, Any]]:
    assert answer.corrupt is not None
    return answer.corrupt


def test_a_sound_version_is_done_and_lies_in_the_area(log):
    stager = Stager(area(), rank=1)
    assert staged(stager, log, log.manifest(1).digest) == StageAnswer()
    found = stager.staged(log.folder(1))
    assert found is not None and found.is_whole and found.manifest == log.manifest(1)
    assert stager.staged(log.folder(2)) is None
    stager.forget()
    assert stager.staged(log.folder(1)) is None


def test_without_an_area_rank_0_checks_and_the_reason_is_given(log):
    for rank in (0, 1):
        stager = Stager(None, rank, refused="there is no memory")
        assert staged(stager, log).refused == "there is no memory"
        found = stager.staged(log.folder(1))
        assert found is not None and found.placement is None
    flip_a_byte(log, 1, FIRST)
    assert staged(Stager(None, 1), log).corrupt is None
    message, detail = corrupt_of(staged(Stager(None, 0), log))
    assert FIRST in message and detail["tensor"] == FIRST


def test_an_unreadable_version_is_corrupt_not_a_worker_failure(log):
    stager = Stager(area(), rank=0)
    (log.folder(1) / "weights-00001.safetensors").unlink()
    assert "cannot be read" in corrupt_of(staged(stager, log))[0]
    assert stager.staged(log.folder(1)) is None
    (log.folder(1) / "manifest.json").write_text("{")
    assert "cannot be read" in corrupt_of(staged(stager, log))[0]


def test_another_version_under_the_same_number_is_refused(log):
    message, _ = corrupt_of(staged(Stager(area(), rank=0), log, digest="0" * 32))
    assert message.endswith(f"with digest {log.manifest(1).digest}, not {'0' * 32}")


def test_a_corrupt_version_is_read_again_and_a_staged_one_is_not(log):
    stager, digest = Stager(area(), rank=0), log.manifest(1).digest
    path = log.folder(1) / "weights-00001.safetensors"
    sound = path.read_bytes()
    flip_a_byte(log, 1, FIRST)
    assert staged(stager, log, digest).corrupt is not None
    path.write_bytes(sound)
    assert staged(stager, log, digest).corrupt is None
    flip_a_byte(log, 1, FIRST)
    assert staged(stager, log, digest).corrupt is None  # it lies in the area since before
    stager.forget()
    assert staged(stager, log, digest).corrupt is not None


def test_memory_that_is_not_there_is_a_reason_and_no_failure(log, monkeypatch):
    huge = torch.nn.Linear(1 << 29, 1 << 29, bias=False, device="meta")
    with pytest.raises(CannotStage, match=r"no 1152921\d+ bytes of memory to stage in"):
        StagingBuffer("host", huge, torch.device("cpu"))

    def refused(*_: object, **__: object) -> torch.Tensor:
        raise CannotStage("pinned memory is refused")

    stager = Stager(StagingBuffer("memory", torch.nn.Linear(8, 8), torch.device("cpu")), rank=0)
    monkeypatch.setattr(staging, "_allocate", refused)
    assert staged(stager, log) == StageAnswer(refused="pinned memory is refused")
    flip_a_byte(log, 1, FIRST)
    assert staged(stager, log).corrupt is not None
