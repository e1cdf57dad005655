"""How many sequences a replica holds."""

import pytest

from rollout_service.engine.admission import AdmissionLimit
from rollout_service.errors import Overloaded


def test_a_full_replica_refuses_with_the_numbers():
    limit = AdmissionLimit(10)
    with limit.admit(10):
        with pytest.raises(Overloaded, match="10 of 10 sequences and 3 more") as refused, limit.admit(3):
            pass
        assert refused.value.detail == {"running": 10, "limit": 10, "asked": 3}
        assert refused.value.retry_after_s
        assert limit.running == 10


def test_a_request_that_fails_gives_its_places_back():
    limit = AdmissionLimit(2)
    with pytest.raises(RuntimeError), limit.admit(2):
        raise RuntimeError
    assert limit.running == 0


@pytest.mark.parametrize("asked", [2, 5, 4096])
def test_one_free_place_takes_a_request_of_any_size(asked):
    limit = AdmissionLimit(4)
    with limit.admit(3), limit.admit(asked):
        assert limit.running == 3 + asked
        with pytest.raises(Overloaded), limit.admit(1):
            pass


def test_a_gateway_has_its_share_of_a_replica_that_another_one_fills():
    limit = AdmissionLimit(10, share=5)
    with limit.admit(10, "a"):
        with pytest.raises(Overloaded), limit.admit(1, "a"):
            pass
        with limit.admit(4, "b"), limit.admit(3, "b"), pytest.raises(Overloaded), limit.admit(1, "b"):
            pass


def test_sequences_are_told_by_the_gateway_that_sent_them():
    limit = AdmissionLimit(10)
    with limit.admit(2, "a"), limit.admit(3, "b"), limit.admit(1, "a"):
        assert limit.by_origin() == {"a": 3, "b": 3} and limit.running == 6
    assert limit.by_origin() == {} and limit.running == 0
