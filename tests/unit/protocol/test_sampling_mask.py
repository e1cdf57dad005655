"""The packed sampling mask: what goes in comes out, in few bytes, and nonsense is refused by what it is."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.protocol.sampling_mask import pack, unpack

KEPT = st.lists(st.sets(st.integers(0, 2**31 - 1), max_size=6).map(sorted), max_size=6)


def lists(chunks: list[str]) -> list[list[int]]:
    counts, ids = unpack(chunks)
    ends = np.cumsum(counts)
    return [ids[end - count : end].tolist() for count, end in zip(counts, ends, strict=True)]


@given(kept=KEPT)
def test_what_is_packed_comes_out(kept):
    assert lists([pack(kept)]) == kept


@given(pieces=st.lists(KEPT, max_size=3))
def test_the_chunks_of_several_engines_are_one_mask(pieces):
    assert lists([pack(piece) for piece in pieces]) == [kept for piece in pieces for kept in piece]


def test_the_layout_by_hand():
    planes = zlib.decompress(base64.b64decode(pack([[5, 7], [], [300]])))
    assert list(planes) == [3, 2, 0, 1, 5, 2, 44] + [0] * 6 + [1] + [0] * 14


def test_a_mask_of_50_random_ids_takes_under_2_5_bytes_per_id():
    rng = np.random.default_rng(0)
    kept = [sorted(rng.choice(2**17, 50, replace=False).tolist()) for _ in range(512)]
    assert len(pack(kept)) < 2.5 * 50 * 512  # ids without any pattern; of 6.9 bytes each as JSON


@pytest.mark.parametrize("kept", [[[2, 1]], [[1, 1]], [[-1, 1]], [[1], [3, 2]]])
def test_ids_that_do_not_ascend_are_refused(kept):
    with pytest.raises(ValueError, match="must ascend"):
        pack(kept)


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ("?", "no base64 of zlib data"),
        (base64.b64encode(b"x").decode(), "no base64 of zlib data"),
        (base64.b64encode(zlib.compress(b"abc")).decode(), "3 bytes"),
        (base64.b64encode(zlib.compress(bytes([9, 0, 0, 0]))).decode(), "of 9 tokens"),
        (base64.b64encode(zlib.compress(bytes([1, 4] + [0] * 6))).decode(), "of 1 tokens"),
    ],
)
def test_what_was_never_packed_is_refused(chunk, why):
    with pytest.raises(ValueError, match=why):
        unpack([chunk])
