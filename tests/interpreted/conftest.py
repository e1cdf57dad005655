"""Tests that run Triton kernels in its interpreter, on the CPU: a process of their own, because Triton must know of it
before it is imported. ``make test-unit`` runs them with ``TRITON_INTERPRET=1``."""

import pytest
import triton

from rollout_service.quant import cuda, digests
from tests.interpreted.host_digests import AddUp


def pytest_configure(config: pytest.Config) -> None:
    if not triton.knobs.runtime.interpret:
        raise pytest.UsageError(
            "tests/interpreted needs Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreted"
        )


@pytest.fixture
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize rows in an eighth of the programs that a GPU gets: the interpreter takes a millisecond for each.

    A program has more rows and fewer columns; most matrices are longer than one holds.
    """
    monkeypatch.setattr(cuda, "_ROWS", 32)
    monkeypatch.setattr(cuda, "_COLUMNS", 128)


@pytest.fixture
def host_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash with numpy. The first use compares it with xxhash, as it does the kernel."""
    monkeypatch.setattr(digests, "add_up", AddUp())
    monkeypatch.setattr(digests, "_tried", set())
