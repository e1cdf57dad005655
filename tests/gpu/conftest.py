"""Tests that only a GPU can decide: ``python -m pytest tests/gpu`` on a host with one. CI has none."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU, and torch sees none")
    # references are computed on the CPU: several workers with a thread for each core would wait for each other
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
