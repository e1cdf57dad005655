"""Changes of a tensor as bytes: the new one comes out of the old one, and nothing else does anything but an error."""

from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.protocol.delta import (
    SEGMENT_BYTES,
    apply_segment,
    changed_segments,
)
from tests.support.tensor_changes import HEADER, ITEMSIZES, Bits, bytes_of, encode, frame, random_bits, segment, stepped


def applied(encoded: bytes, old: Bits) -> Bits:
    new = old.copy()
    for changed in changed_segments(memoryview(encoded), new.nbytes, new.itemsize):
        apply_segment(changed, bytes_of(new)[changed.place], new.itemsize)
    return new


def round_trip(old: Bits, new: Bits) -> bytes:
    """The encoding, after it was seen to make ``new`` of ``old``."""
    encoded = encode(bytes_of(old), bytes_of(new), old.itemsize)
    if encoded:
        np.testing.assert_array_equal(applied(encoded, old), new)
    else:
        np.testing.assert_array_equal(old, new)
    return encoded


class TestRoundTrip:
    @given(st.sampled_from(ITEMSIZES), st.data())
    def test_any_tensor_becomes_any_other(self, itemsize, data):
        pairs = data.draw(st.lists(st.tuples(*[st.integers(0, 256**itemsize - 1)] * 2), max_size=300))
        old, new = (np.array([pair[i] for pair in pairs], f"<u{itemsize}") for i in (0, 1))
        round_trip(old, new)

    @given(st.sampled_from(ITEMSIZES), st.integers(1, 100_000), st.floats(0, 0.3), st.integers(0, 2**32))
    def test_a_step_of_a_few_elements(self, itemsize, size, share, seed):
        old = random_bits(size, itemsize, seed)
        round_trip(old, stepped(old, share, seed))

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @pytest.mark.parametrize("size", [0, 1, 7, 100_001])
    def test_nothing_changed_is_no_byte_and_all_is_one_more_than_the_tensor(self, itemsize, size):
        old = random_bits(size, itemsize)
        assert round_trip(old, old.copy()) == b""
        assert len(round_trip(old, ~old)) == (old.nbytes + 1 if size else 0)

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @pytest.mark.parametrize("at", [[0], [-1], [0, -1], [255], [256], [65_535, 65_536], [0, 70_000], [1, 257]])
    def test_changes_at_the_ends_and_beyond_each_plane_of_a_gap(self, itemsize, at):
        old = random_bits(150_001, itemsize)
        new = old.copy()
        new[at] += new.dtype.type(1)
        assert len(round_trip(old, new)) < 80

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_a_gap_as_long_as_a_segment(self, itemsize):
        size = SEGMENT_BYTES // itemsize
        old = random_bits(size, itemsize)
        new = old.copy()
        new[-1] ^= new.dtype.type(1)
        assert len(round_trip(old, new)) < 80

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_a_tensor_of_several_segments_of_which_one_is_unchanged_and_one_is_new(self, itemsize):
        size = 2 * SEGMENT_BYTES // itemsize
        old = random_bits(size + 5, itemsize)
        new = old.copy()
        new[size // 2 : size] = random_bits(size // 2, itemsize, seed=2)
        new[-2] -= new.dtype.type(1)
        encoded = round_trip(old, new)
        assert encoded[0] == 0 and encoded[1] == 2 and encoded[2 + SEGMENT_BYTES] in (1, 2)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_the_largest_steps_wrap_around(itemsize):
    old = np.zeros(64, f"<u{itemsize}")
    for step in (256**itemsize - 1, 256**itemsize // 2, 256**itemsize // 2 - 1):
        new = old.copy()
        new[5] = step
        round_trip(old, new)
        round_trip(new, old)


@pytest.mark.parametrize(("itemsize", "share"), [(1, 0.003), (2, 0.02), (1, 0.05)])
def test_the_bytes_are_close_to_the_entropy(itemsize, share):
    old = random_bits(4 << 20, itemsize)
    rng = np.random.default_rng(3)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < share)
    new[at] += rng.choice(np.array([-1, 1]).astype(old.dtype), at.size)
    of_positions = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    bits_per_change = 8 * len(round_trip(old, new)) / at.size
    up_or_down = 1
    assert bits_per_change < 1.15 * (of_positions + up_or_down)


def sized(values: bytes) -> bytes:
    """A plane that tells its size."""
    return zstandard.ZstdCompressor(1, write_content_size=True).compress(values)


class TestCorrupted:
    """Changes of 100 bytes that are all zero."""

    @pytest.mark.parametrize(
        ("encoded", "complaint"),
        [
            (b"", "segment 0: it is not there"),
            (b"\x03", "begins with 3, which is no kind"),
            (b"\x00\x00", "1 bytes are left over"),
            (b"\x02" + bytes(99), "99 bytes of 100 are there"),
            (b"\x02" + bytes(101), "1 bytes are left over"),
            (HEADER.pack(1, 1, 0, 0, 0, 0)[:-1], "ends in its header"),
            (segment(0, b"", b"", b"", b""), "0 changes in 100 elements"),
            (segment(101, b"", b"", b"", b""), "101 changes in 100 elements"),
            (segment(2**32 - 1, b"", b"", b"", b""), "4294967295 changes in 100 elements"),
            (segment(1, b"", b"", b"", b"", lengths=[0, 0, 0, 9]), "planes have 9 bytes, and 0 are there"),
            (segment(1, *[b""] * 4, lengths=[2**32 - 1] * 4), "planes have 17179869180 bytes"),
            (segment(1, frame(b"\x64"), b"", b"", frame(b"\x01")), "last change is at element 100 of 100"),
            (segment(1, b"", b"", frame(b"\xff"), b""), "last change is at element 16711680 of 100"),
            (segment(2, frame(b"\x60\x03"), b"", b"", b""), "last change is at element 100 of 100"),
            (segment(1, b"\x00\xff\xff", b"", b"", b""), "segment 0: cannot get frame parameters"),
            (segment(1, frame(b"\x01\x02"), b"", b"", b""), "did not decompress full frame"),
            (segment(3, b"", frame(b"\x01\x02"), b"", b""), "plane 1 does not decode to 3 bytes"),
            (segment(1, frame(b"\x01")[:-1], b"", b"", b""), "did not decompress full frame"),
            (segment(1, frame(b"\x01") + b"\x00", b"", b"", b""), "unused data"),
            (segment(1, b"", b"", b"", frame(bytes(1 << 20))), "did not decompress full frame"),
            (segment(1, b"", b"", b"", sized(bytes(1 << 20))), "plane 3 does not decode to 1 bytes"),
        ],
    )
    def test_what_is_no_encoding_is_refused(self, encoded, complaint):
        with pytest.raises(ValueError, match=complaint):
            applied(encoded, np.zeros(100, np.uint8))

    def test_a_frame_that_tells_its_size_is_not_opened(self):
        petabyte = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little")  # RFC 8878, 3.1.1: 8 bytes of size
        with pytest.raises(ValueError, match="plane 3 does not decode"):
            applied(segment(1, b"", b"", b"", petabyte), np.zeros(100, np.uint8))

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @given(data=st.data())
    def test_whatever_is_damaged_or_cut_off_raises_nothing_but_value_errors(self, itemsize, data):
        old = random_bits(5_000, itemsize)
        encoded = bytearray(encode(bytes_of(old), bytes_of(stepped(old, 0.02)), itemsize))
        damage: list[Callable[[], object]] = [
            lambda: encoded.__setitem__(data.draw(st.integers(0, len(encoded) - 1)), data.draw(st.integers(0, 255))),
            lambda: encoded.__delitem__(slice(data.draw(st.integers(0, len(encoded) - 1)), None)),
            lambda: encoded.extend(data.draw(st.binary(min_size=1, max_size=8))),
        ]
        data.draw(st.sampled_from(damage))()
        try:
            applied(bytes(encoded), old)
        except ValueError:
            return
