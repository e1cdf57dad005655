"""How many sequences a replica holds."""

import pytest

from rollout_service.engine.admission import AdmissionLimit
from rollout_service.errors import Overloaded


def test_a_running_request_takes_places_and_then_frees_them() -> None:
    limit = AdmissionLimit(10)
    with limit.admit(4):
        assert limit.running == 4
        with limit.admit(6):
            assert limit.running == 10
        assert limit.running == 4
    assert limit.running == 0


def test_a_request_that_does_not_fit_is_refused_with_the_numbers() -> None:
    limit = AdmissionLimit(10)
    with limit.admit(8):
        with pytest.raises(Overloaded, match="8 of 10 sequences and 3 more") as refused, limit.admit(3):
            pass
        assert refused.value.detail == {"running": 8, "limit": 10, "asked": 3}
        assert refused.value.retry_after_s
        assert limit.running == 8


def test_a_refused_request_takes_no_place() -> None:
    limit = AdmissionLimit(2)
    with limit.admit(2):
        for _ in range(5):
            with pytest.raises(Overloaded), limit.admit(1):
                pass
    with limit.admit(2):
        assert limit.running == 2


def test_a_request_that_fails_gives_its_places_back() -> None:
    limit = AdmissionLimit(2)
    with pytest.raises(RuntimeError), limit.admit(2):
        raise RuntimeError
    assert limit.running == 0


def test_a_request_larger_than_the_limit_runs_alone() -> None:
    limit = AdmissionLimit(4)
    with limit.admit(100):
        assert limit.running == 100
        with pytest.raises(Overloaded), limit.admit(1):
            pass
    with limit.admit(1), pytest.raises(Overloaded), limit.admit(100):
        pass


def test_sequences_are_told_by_the_gateway_that_sent_them() -> None:
    limit = AdmissionLimit(10)
    with limit.admit(2, "a"), limit.admit(3, "b"), limit.admit(1, "a"):
        assert limit.by_origin() == {"a": 3, "b": 3} and limit.running == 6
    assert limit.by_origin() == {} and limit.running == 0
