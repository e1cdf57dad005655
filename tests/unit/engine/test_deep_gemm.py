"""Processes that compile DeepGEMM's kernels. The kernels themselves: tests/gpu/test_deep_gemm.py."""

import json
import logging
import struct
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollout_service.engine.kernels.deep_gemm import compile_once, run_beside_first_forward, taken

SIZES = [(tokens, rows, 256) for rows in (128, 384) for tokens in range(1, 200)]


def writing(folder: Path, then: str = "") -> list[str]:
    """Return a command that writes the sizes it takes to a file of its own, and then does ``then``.

    It reads as ``taken`` does, without the import of vLLM.
    """
    code = (
        "import json, os, pathlib, struct, sys\n"
        "sizes = [size for found in iter(lambda: os.read(0, 240), b'') for size in struct.iter_unpack('<3q', found)]\n"
        "pathlib.Path(sys.argv[1], str(os.getpid())).write_text(json.dumps(sizes))\n"
    )
    return [sys.executable, "-c", code + then, str(folder)]


def written(folder: Path) -> list[tuple[int, ...]]:
    """Return the sizes that the processes took."""
    return [tuple(size) for path in folder.iterdir() for size in json.loads(path.read_text())]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    return folder


def test_processes_that_read_at_once_get_different_sizes() -> None:
    with tempfile.TemporaryFile() as queue:
        queue.writelines(struct.pack("<3q", number, 0, 0) for number in range(200_000))
        queue.seek(0)
        with ThreadPoolExecutor(8) as pool:  # the position is that of the open file, whoever reads
            found = pool.map(lambda _: list(taken(queue.fileno())), range(8))
            assert sorted(size[0] for sizes in found for size in sizes) == list(range(200_000))


def test_each_size_is_compiled_once_for_a_host(told: Path, tmp_path: Path) -> None:
    replicas = [
        threading.Thread(target=compile_once, args=(SIZES, 3, tmp_path / "marker", writing(told))) for _ in range(3)
    ]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    assert len(list(told.iterdir())) == 3 and sorted(written(told)) == sorted(SIZES)


@pytest.mark.parametrize("then", ["sys.exit(3)", "import time; time.sleep(600)"])
def test_processes_that_fail_are_logged_and_run_again(
    told: Path, tmp_path: Path, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        compile_once(SIZES, 1, tmp_path / "marker", writing(told, then), limit_s=2.0)
    assert "1 of 1 processes failed" in caplog.text
    assert (tmp_path / "marker").read_bytes() == b""
    compile_once(SIZES, 1, tmp_path / "marker", writing(told))
    assert (tmp_path / "marker").read_bytes() != b""


def test_a_models_first_forward_pass_runs_beside_the_work_and_waits_for_its_end() -> None:
    began, done = threading.Event(), list[str]()

    class Model(torch.nn.Module):
        def forward(self, name: str) -> None:
            done.append(name)
            began.set()

    def work() -> None:
        assert began.wait(60)
        done.append("work")

    model = Model()
    run_beside_first_forward(model, work)
    model("first")
    assert done == ["first", "work"]
    model("second")
    assert done == ["first", "work", "second"]
