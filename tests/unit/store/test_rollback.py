"""Going back in a log: a kept version under a new number, and which version a label means."""

import errno
import os
from pathlib import Path

import pytest

from rollout_service.errors import LogCorrupt, NotFound
from rollout_service.store import labels
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog
from rollout_service.store.rollback import require_kept, stage_again
from tests.unit.store.versions import FIRST, commit, flip_a_byte, stage


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    """Versions 1 to 3."""
    log = WeightLog(tmp_path / "log")
    for version in (1, 2, 3):
        commit_labelled(log, version, f"run/step-{version}")
    return log


def commit_labelled(log: WeightLog, version: int, label: str | None) -> None:
    log.commit(stage(log, version).replace(label=label), "keep")


def roll_back(log: WeightLog, source: int, version: int) -> None:
    log.commit(stage_again(log, log.manifest(source), version), "keep")


class TestFiles:
    @pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
    def test_without_hard_links_the_files_are_copied(self, log, monkeypatch, code):
        def no_links(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "link", no_links)
        roll_back(log, 2, 4)
        log.verify(log.manifest(4))
        assert not os.path.samefile(
            log.folder(2) / "weights-00001.safetensors", log.folder(4) / "weights-00001.safetensors"
        )

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

    @pytest.mark.parametrize(("version", "when"), [(0, "any more"), (9, "yet")])
    def test_a_version_that_is_not_kept_is_refused(self, log, version, when):
        known = VersionLabels(log)
        known.load()
        with pytest.raises(NotFound, match=f"not in the log {when}: kept are 1 \\(run/step-1\\), 2 ") as refused:
            require_kept(log.versions(), version, known)
        assert refused.value.detail == {"version": version, "versions": [1, 2, 3]}


class TestLabels:
    def test_labels_outlive_their_versions_and_the_process(self, log):
        first = VersionLabels(log)
        first.load()
        first.note(3, "run/step-3")
        log.drop(1)
        commit_labelled(log, 4, "run/step-4")  # committed, and the process died before it was noted
        again = VersionLabels(log)
        again.load()
        assert [again.number_of(f"run/step-{step}") for step in (1, 2, 3, 4)] == [1, 2, 3, 4]

    def test_a_log_that_was_set_back_forgets_later_labels(self, log):
        known = VersionLabels(log)
        known.load()
        known.note(9, "run/step-9")
        again = VersionLabels(log)
        again.load()
        assert again.number_of("run/step-3") == 3
        with pytest.raises(NotFound, match="run/step-9"):
            again.number_of("run/step-9")

    def test_a_damaged_file_loses_labels_and_no_more(self, log):
        (log.root / "LABELS").write_text("{")
        (log.folder(2) / "manifest.json").write_text("{")
        known = VersionLabels(log)
        known.load()
        assert [known.number_of(f"run/step-{step}") for step in (1, 3)] == [1, 3]
        with pytest.raises(NotFound, match="newest labels are run/step-3, run/step-1:"):
            known.number_of("run/step-2")

    def test_a_version_that_cannot_be_read_loses_its_label_and_no_more(self, log, caplog):
        manifest = log.folder(2) / "manifest.json"
        manifest.unlink()
        manifest.mkdir()
        known = VersionLabels(log)
        known.load()
        assert [known.find(f"run/step-{step}") for step in (1, 2, 3)] == [1, None, 3]
        assert "the label of version 2 is lost, if it had one" in caplog.text

    def test_an_unknown_label_names_the_newest(self, log):
        known = VersionLabels(log)
        known.load()
        with pytest.raises(NotFound, match="newest labels are run/step-3, run/step-2, run/step-1") as refused:
            known.number_of("run/step-8")
        assert refused.value.detail == {"label": "run/step-8", "labels": ["run/step-3", "run/step-2", "run/step-1"]}

    def test_only_so_many_are_kept(self, log, monkeypatch):
        monkeypatch.setattr(labels, "MAX_LABELS", 2)
        known = VersionLabels(log)
        known.load()
        known.note(4, "run/step-4")
        assert set(log.labels().labels) == {"run/step-3", "run/step-4"}

    def test_a_log_without_labels_has_none(self, tmp_path):
        log = WeightLog(tmp_path / "log")
        commit(log, 0)
        known = VersionLabels(log)
        known.load()
        with pytest.raises(NotFound, match="the newest labels are none"):
            known.number_of("a")
