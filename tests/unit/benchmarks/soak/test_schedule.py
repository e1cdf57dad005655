"""Strikes are drawn from a seed."""

from itertools import islice

from benchmarks.soak.schedule import LONGEST_PAUSE_S, LONGEST_STOP_S, SIGNALS, TITLES, strikes


def test_a_seed_always_gives_the_same_strikes() -> None:
    first, again, other = (list(islice(strikes(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_victim_gets_every_signal() -> None:
    drawn = list(islice(strikes(3), 1000))
    assert {(strike.victim, strike.signal) for strike in drawn} == {(v, s) for v in TITLES for s in SIGNALS}
    assert 0.7 < sum(strike.waits for strike in drawn) / len(drawn) < 0.8
    for strike in drawn:
        assert 0 <= strike.pause_s <= LONGEST_PAUSE_S and 0 <= strike.pick < 1
        assert (0 < strike.stopped_s <= LONGEST_STOP_S) == (strike.signal == "SIGSTOP")
