"""Tests that run Triton kernels in its interpreter, on the CPU: a process of their own, because Triton must know of it
before it is imported. ``make test-unit`` runs them with ``TRITON_INTERPRET=1``."""

import pytest
import triton


def pytest_configure(config: pytest.Config) -> None:
    if not triton.knobs.runtime.interpret:
        raise pytest.UsageError(
            "tests/interpreted needs Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreted"
        )
