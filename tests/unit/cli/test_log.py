"""``rollout-service log`` on a log on disk."""

import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollout_service.cli.main import app
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from tests.unit.store.versions import FIRST, commit, flip_a_byte


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    """Versions 0 to 3."""
    log = WeightLog(tmp_path / "log")
    for version in range(4):
        commit(log, version)
    return log


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["log", *map(str, arguments)])


def test_ls_lists_the_versions_and_marks_the_newest(log):
    result = run("ls", log.root)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and [line.split()[0] for line in lines] == ["0", "1", "2", "*"]
    assert log.manifest(3).digest in lines[3]


def test_verify_lists_sound_versions_and_fails_for_the_others(log):
    assert run("verify", log.root).exit_code == 0
    flip_a_byte(log, 2, FIRST)
    result = run("verify", log.root)
    assert result.exit_code == 1 and FIRST in result.stderr and "1 of 4 versions" in result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["version 0", "version 1", "version 3"]
    assert run("verify", log.root, "--version", 1).exit_code == 0
    assert run("verify", log.root, "--version", 2).exit_code == 1


def test_verify_of_a_missing_version_says_which_there_are(log):
    result = run("verify", log.root, "--version", 9)
    assert result.exit_code == 1 and "version 9 is not in" in result.stderr and "0, 1, 2, 3" in result.stderr
    assert "damaged" not in result.stderr


def test_verify_fails_if_the_newest_version_is_gone(log):
    shutil.rmtree(log.folder(3))
    result = run("verify", log.root)
    assert result.exit_code == 1 and "version 3 is not in the log" in result.stderr
    assert "1 of 4 versions" in result.stderr and run("verify", log.root, "--version", 2).exit_code == 0


def test_ls_lists_what_can_be_read_beside_what_cannot(log):
    (log.folder(1) / "manifest.json").write_text("")
    (log.root / "staging" / "4.parts").mkdir(parents=True)
    (log.root / "staging" / "4.parts" / "upload.json").write_text("{}")
    result = run("ls", log.root)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["0", "2", "*"]
    assert result.exit_code == 1 and "2 versions in" in result.stderr
    assert "1/manifest.json: Input data was truncated" in result.stderr and "4.parts/upload.json" in result.stderr


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_version_that_the_ingest_removes_meanwhile_is_not_damaged(log, monkeypatch, command):
    read = WeightLog.manifest

    def late(self: WeightLog, version: int, digest: str | None = None) -> Manifest:
        if version == 0:
            self.drop(0)
        return read(self, version, digest)

    monkeypatch.setattr(WeightLog, "manifest", late)
    result = run(command, log.root)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_damaged_log_is_told_in_plain_words(log, command):
    (log.root / "LATEST").write_text('{"version": -1}')
    result = run(command, log.root)
    assert result.exit_code == 1 and "LATEST does not parse: digest: Field required" in result.stderr
    assert "pydantic" not in result.stderr and "validation error" not in result.stderr


@pytest.mark.parametrize(
    ("to", "why"), [("1", "http://127.0.0.1:1: "), ("a b", "neither the number of a version nor a label")]
)
def test_rollback_without_a_service_or_version_is_an_error(to, why):
    result = run("rollback", "http://127.0.0.1:1", "--to", to)
    assert result.exit_code == 1 and why in result.stderr


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_that_is_no_log_is_an_error(tmp_path, command):
    result = run(command, tmp_path)
    assert result.exit_code == 1 and "is not a log of weight versions" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_that_cannot_be_looked_into_is_an_error(command):
    result = run(command, 300 * "a")
    assert result.exit_code == 1 and result.stderr.startswith("rollout-service: [Errno 36] File name too long")


def test_rollback_trusts_the_authorities_of_a_file(tmp_path):
    result = run("rollback", "https://127.0.0.1:1", "--to", "1", "--ca-file", tmp_path / "none.pem")
    assert result.exit_code == 1 and "none.pem' is no file of certificates in PEM" in result.stderr
