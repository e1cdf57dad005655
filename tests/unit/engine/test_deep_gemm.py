"""Processes that compile DeepGEMM's kernels. The kernels themselves: tests/gpu/test_deep_gemm.py."""

import json
import logging
import sys
import threading
from pathlib import Path

import pytest

from rollout_service.engine.kernels.deep_gemm import compile_once

SIZES = [(tokens, rows, 256) for rows in (128, 384) for tokens in (1, 8, 64)]


def writing(folder: Path, then: str = "") -> list[str]:
    """Return a command that writes the sizes it is told to a file of its own, and then does ``then``."""
    code = "import os, sys, pathlib; pathlib.Path(sys.argv[1], str(os.getpid())).write_text(sys.stdin.read())\n"
    return [sys.executable, "-c", code + then, str(folder)]


def written(folder: Path) -> list[list[tuple[int, ...]]]:
    """Return the sizes that each process was told."""
    return [[tuple(size) for size in json.loads(path.read_text())] for path in sorted(folder.iterdir())]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    return folder


def test_each_process_is_told_all_sizes_in_its_own_order(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)))
    compile_once(SIZES, tmp_path / "cache" / "marker", writing(told))
    lists = written(told)
    assert len(lists) == 3
    assert all(sorted(sizes) == sorted(SIZES) for sizes in lists)
    assert lists[0] != lists[1] != lists[2] != lists[0]


def test_kernels_are_compiled_once_for_a_host(told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    replicas = [
        threading.Thread(target=compile_once, args=(SIZES, tmp_path / "marker", writing(told))) for _ in range(3)
    ]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    assert len(written(told)) == 1


@pytest.mark.parametrize("then", ["sys.exit(3)", "import time; time.sleep(600)"])
def test_processes_that_fail_are_logged_and_run_again(
    told: Path, tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with caplog.at_level(logging.WARNING):
        compile_once(SIZES, tmp_path / "marker", writing(told, then), limit_s=2.0)
    assert "1 of 1 processes failed" in caplog.text
    assert (tmp_path / "marker").read_bytes() == b""
    compile_once(SIZES, tmp_path / "marker", writing(told))
    assert (tmp_path / "marker").read_bytes() != b""
