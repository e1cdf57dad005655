"""Going back in a log: a kept version under a new number, and which version a label means."""

import errno
import os
from pathlib import Path

import pytest

from rollout_service.errors import LogCorrupt, NotFound
from rollout_service.store import labels
from rollout_service.store.labels import VersionLabels, require_kept
from rollout_service.store.log import WeightLog, stage_again
from tests.unit.store.versions import FIRST, flip_a_byte, stage


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    """Versions 1 to 3."""
    log = WeightLog(tmp_path / "log")
    for version in (1, 2, 3):
        commit_labelled(log, version, f"run/step-{version}")
    return log


def commit_labelled(log: WeightLog, version: int, label: str | None) -> None:
    log.commit(stage(log, version).replace(label=label), "keep")


def labels_of(log: WeightLog) -> VersionLabels:
    known = VersionLabels(log)
    known.load()
    return known


class TestFiles:
    def test_without_hard_links_the_files_are_copied(self, log, monkeypatch):
        def no_links(*_: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", no_links)
        log.commit(stage_again(log, log.manifest(2), 4), "keep")
        log.verify(log.manifest(4))
        assert not os.path.samefile(*(log.folder(version) / "weights-00001.safetensors" for version in (2, 4)))

    def test_a_disk_that_fails_leaves_nothing_staged(self, log, monkeypatch):
        def broken(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "link", broken)
        with pytest.raises(OSError, match="Input/output"):
            stage_again(log, log.manifest(1), 4)
        assert not log.staging(4).exists() and log.versions() == [1, 2, 3]

    def test_a_damaged_version_is_not_gone_back_to(self, log):
        flip_a_byte(log, 1, FIRST)
        with pytest.raises(LogCorrupt, match=FIRST):
            stage_again(log, log.manifest(1), 4)
        assert not log.staging(4).exists()

    def test_a_version_that_is_not_kept_is_refused(self, log):
        for version, when in ((0, "any more"), (9, "yet")):
            with pytest.raises(NotFound, match=f"not in the log {when}: kept are 1 \\(run/step-1\\), 2 ") as refused:
                require_kept(log.versions(), version, labels_of(log))
            assert refused.value.detail == {"version": version, "versions": [1, 2, 3]}


class TestLabels:
    def test_labels_outlive_their_versions_and_the_process(self, log):
        labels_of(log).note(3, "run/step-3")
        log.drop(1)
        commit_labelled(log, 4, "run/step-4")  # committed, and the process died before it was noted
        again = labels_of(log)
        assert [again.number_of(f"run/step-{step}") for step in (1, 2, 3, 4)] == [1, 2, 3, 4]

    def test_a_log_that_was_set_back_forgets_later_labels(self, log):
        known = labels_of(log)
        known.note(9, "run/step-9")
        again = labels_of(log)
        assert again.number_of("run/step-3") == 3
        with pytest.raises(NotFound, match="run/step-9"):
            again.number_of("run/step-9")

    def test_what_cannot_be_read_loses_its_label_and_no_more(self, log, caplog):
        (log.root / "LABELS").write_text("{")
        (log.folder(1) / "manifest.json").write_text("{")
        (log.folder(2) / "manifest.json").unlink()
        (log.folder(2) / "manifest.json").mkdir()
        known = labels_of(log)
        assert [known.find(f"run/step-{step}") for step in (1, 2, 3)] == [None, None, 3]
        with pytest.raises(NotFound, match="newest labels are run/step-3:") as refused:
            known.number_of("run/step-2")
        assert refused.value.detail == {"label": "run/step-2", "labels": ["run/step-3"]}
        assert "the label of version 2 is lost, if it had one" in caplog.text

    def test_only_so_many_are_kept(self, log, monkeypatch):
        monkeypatch.setattr(labels, "MAX_LABELS", 2)
        known = labels_of(log)
        known.note(4, "run/step-4")
        assert set(log.labels().labels) == {"run/step-3", "run/step-4"}
