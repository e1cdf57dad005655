"""Memory shared by two processes, in batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.protocol.ring import Ring, aligned

RING_BYTES = 1024


@given(st.data())
def test_no_two_batches_share_a_byte(data):
    ring, taken = Ring(RING_BYTES), []
    for _ in range(60):
        nbytes = data.draw(st.integers(0, RING_BYTES))
        if (start := ring.take(nbytes)) is None:
            assert taken  # an empty ring has room for whatever fits into it
            del taken[0]
            ring.give_back(1)
            continue
        batch = range(start, start + nbytes)
        assert start % 64 == 0 and batch.stop <= RING_BYTES
        assert all(batch.stop <= other.start or other.stop <= batch.start for other in taken)
        taken.append(batch)


def test_what_was_given_back_is_used_again():
    ring = Ring(256)
    assert [ring.take(128), ring.take(128), ring.take(1)] == [0, 128, None]
    ring.give_back(1)
    assert [ring.take(64), ring.take(64), ring.take(64)] == [0, 64, None]


def test_what_never_fits_is_an_error():
    with pytest.raises(ValueError, match="1025 bytes do not fit into 1024"):
        Ring(RING_BYTES).take(RING_BYTES + 1)


def test_offsets_suit_every_dtype():
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
