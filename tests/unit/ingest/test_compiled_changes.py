"""What is applied by a compiled loop is what numpy applies, and what is no encoding is refused as there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.ingest.sources.compiled_changes import apply_segment
from rollout_service.protocol import delta
from tests.unit.protocol.test_delta import ITEMSIZES, Bits, bytes_of, deflated, random_bits, segment, stepped


def segments_of(old: Bits, new: Bits) -> list[delta.Segment]:
    encoded = delta.encode(bytes_of(old), bytes_of(new), old.itemsize)
    return delta.changed_segments(memoryview(encoded), new.nbytes, old.itemsize) if encoded else []


@given(st.sampled_from(ITEMSIZES), st.integers(1, 100_000), st.floats(0, 0.4), st.integers(0, 2**32))
def test_a_step_makes_the_same_elements_and_returns_those_that_were_told(
    itemsize: int, size: int, share: float, seed: int
) -> None:
    old = random_bits(size, itemsize, seed)
    new = stepped(old, share, seed)
    by_loop, by_numpy = old.copy(), old.copy()
    for each in segments_of(old, new):
        became = apply_segment(each, bytes_of(by_loop), itemsize)
        np.testing.assert_array_equal(became, delta.apply_segment(each, bytes_of(by_numpy), itemsize))
        assert became.dtype == old.dtype
    np.testing.assert_array_equal(by_loop, new)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("at", [[0], [-1], [255], [256], [65_535, 65_536], [0, 70_000], [1, 257]])
@pytest.mark.parametrize("share_of_all", [0, 1 / 256, 1 / 2, 1])
def test_changes_beyond_each_plane_of_gaps_and_differences(itemsize: int, at: list[int], share_of_all: float) -> None:
    old = random_bits(150_001, itemsize)
    new = old.copy()
    step = (
        int(share_of_all * 256**itemsize) + 1
    )  # a step of one, of one plane or more, of half of all numbers, or around
    new[at] += np.int64(step).astype(old.dtype)
    made = old.copy()
    for each in segments_of(old, new):
        apply_segment(each, bytes_of(made), itemsize)
    np.testing.assert_array_equal(made, new)


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        (
            segment(1, deflated(b"\x64"), b"", b"", deflated(b"\x01")),
            "segment 0: its last change is at element 100 of 1",
        ),
        (segment(1, b"", b"", deflated(b"\xff"), b""), "its last change is at element 16711680 of 100"),
        (segment(2, deflated(b"\x60\x03"), b"", b"", b""), "its last change is at element 100 of 100"),
        (segment(1, b"\x00\xff\xff", b"", b"", b""), "segment 0: .*(invalid block type|Error -3)"),
        (segment(3, deflated(b"\x01\x02"), b"", b"", b""), "segment 0: plane 0 does not decode to 3 bytes"),
    ],
)
def test_what_is_no_encoding_is_refused(encoded: bytes, complaint: str) -> None:
    memory = bytearray(200)
    (only,) = delta.changed_segments(memoryview(encoded), 100, 1)
    with pytest.raises(ValueError, match=complaint):
        apply_segment(only, memoryview(memory)[:100], 1)
    assert not any(memory[100:])
