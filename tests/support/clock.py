"""A clock that stands still until a test moves it."""

import time
from typing import Any


class Clock:
    """Takes the place of the module ``time`` in a module under test: ``monkeypatch.setattr(module, "time", Clock())``.

    Everything but ``monotonic`` is the real one's.
    """

    def __init__(self) -> None:
        self._now_s = 1000.0  # whole, so that sums are exact

    def monotonic(self) -> float:
        """As ``time.monotonic``, plus what ``go_on`` was told."""
        return self._now_s

    def go_on(self, seconds: float) -> None:
        """Time passes."""
        self._now_s += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
