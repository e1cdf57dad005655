"""Tests that only a GPU can decide: ``python -m pytest tests/gpu`` on a host with one. CI has none."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU, and torch sees none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
