"""Tests that only a GPU can decide: ``python -m pytest tests/gpu`` on a host with one. CI has none."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU, and torch sees none")
    # references are computed on the CPU, where workers with a thread for each core would slow each other down
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory: a log there is registered with the GPU."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
