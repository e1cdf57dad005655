"""Time without service, and versions that the log has lost."""

import pytest

from benchmarks.soak.account import Outage, Timeline, Versions


def timeline(*answers: float) -> Timeline:
    found = Timeline()
    for at in answers:
        found.answered(at)
    return found


def test_the_longest_outage_is_the_longest_gap_between_answers():
    found = timeline(0.1, 0.2, 5.2, 5.3, 7.3)
    assert found.longest(7.4) == Outage(0.2, pytest.approx(5.0))
    assert found.outages(7.4, longer_than_s=1.5) == [
        Outage(0.2, pytest.approx(5.0)),
        Outage(5.3, pytest.approx(2.0)),
    ]


def test_a_service_that_does_not_come_back_is_away_until_the_end():
    assert timeline(0.1).longest(60.0) == Outage(0.1, pytest.approx(59.9))
    assert timeline(50.0).longest(60.0) == Outage(0.0, 50.0)


def test_a_version_older_than_the_newest_of_the_log_is_not_lost():
    found = Versions()
    for version in (1, 2, 3):
        found.said(version)
    assert found.found(3) == set() and found.found(4) == set()
    assert found.newest == 3


def test_versions_that_the_log_has_no_more_are_lost_once():
    found = Versions()
    for version in (1, 2, 3):
        found.said(version)
    assert found.found(1) == {2, 3}
    assert found.found(1) == set()
    found.said(4)
    assert found.found(4) == set() and found.lost == {2, 3}
    assert found.found(-1) == {1, 4}
