"""Seconds spent in each phase of a push."""

from __future__ import annotations

import time


class Laps:
    """A stopwatch. Not thread-safe."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Add the time since the last call to the phase."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        return f"{self._last - self._begun:.2f} s ({phases})"
