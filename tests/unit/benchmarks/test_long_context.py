"""The figures that the benchmark of long contexts computes from arrivals."""

import pytest

from benchmarks.update.long_context import Arrivals, Case, show


def case() -> Case:
    return Case("tiny", None, "keep", sessions=2, prompt_tokens=8, window_s=2.0)


def test_rates_and_silences_are_around_the_push() -> None:
    steady: Arrivals = [(0.25 * at, 1) for at in range(60)]
    silent: Arrivals = [(at, count) for at, count in steady if not 10 < at < 11.5]
    measured = case()
    show(measured, [steady, silent], begin=10.0, closed_at=10.0)
    assert (measured.before, measured.after) == (8.0, (8 + 3) / 2.0)
    assert measured.silences_s == [0.25, 1.5]
    assert measured.bins["-0.5"] == 4 and measured.bins["0.5"] == 2


def test_stream_that_ends_within_the_window_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"ended 1\.0 s after the engine closed: raise --out"):
        show(case(), [[(0.0, 1), (11.0, 1)]], begin=10.0, closed_at=10.0)
