"""Changes of a tensor as bytes: the new one comes out of the old one, and nothing else does anything but an error."""

import struct
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.protocol import delta, delta_planes
from rollout_service.protocol.delta import SEGMENT_BYTES, apply, encode

Bits = npt.NDArray[np.unsignedinteger]
ITEMSIZES = [1, 2, 4]
HEADER = struct.Struct("<BI4I")
"""Of a changed segment of bytes."""
DEFLATED, STORED, TWO_VALUES = range(3)
"""How a plane is coded, by its first byte."""


def random_bits(size: int, itemsize: int, seed: int = 0) -> Bits:
    dtype = np.dtype(f"<u{itemsize}")
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)


def stepped(old: Bits, share: float, seed: int = 1) -> Bits:
    """A share of the elements one step up or down, and some of these by any step."""
    rng = np.random.default_rng(seed)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < share)
    steps = np.where(rng.random(at.size) < 0.9, rng.choice([-1, 1], at.size), rng.integers(-(2**31), 2**31, at.size))
    new[at] += steps.astype(np.int64).astype(old.dtype)
    return new


def bytes_of(bits: Bits) -> memoryview:
    return bits.view(np.uint8).data


def applied(encoded: bytes, old: Bits) -> Bits:
    new = old.copy()
    apply(memoryview(encoded), bytes_of(new), old.itemsize)
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
    def test_any_tensor_becomes_any_other(self, itemsize: int, data: st.DataObject) -> None:
        pairs = data.draw(st.lists(st.tuples(*[st.integers(0, 256**itemsize - 1)] * 2), max_size=300))
        old, new = (np.array([pair[i] for pair in pairs], f"<u{itemsize}") for i in (0, 1))
        round_trip(old, new)

    @given(st.sampled_from(ITEMSIZES), st.integers(1, 100_000), st.floats(0, 0.3), st.integers(0, 2**32))
    def test_a_step_of_a_few_elements(self, itemsize: int, size: int, share: float, seed: int) -> None:
        old = random_bits(size, itemsize, seed)
        round_trip(old, stepped(old, share, seed))

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @pytest.mark.parametrize("size", [0, 1, 7, 100_001])
    def test_nothing_changed_is_no_byte(self, itemsize: int, size: int) -> None:
        old = random_bits(size, itemsize)
        assert round_trip(old, old.copy()) == b""

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @pytest.mark.parametrize("size", [1, 7, 100_001])
    def test_everything_changed_is_a_byte_more_than_the_tensor(self, itemsize: int, size: int) -> None:
        old, new = random_bits(size, itemsize), ~random_bits(size, itemsize)
        assert len(round_trip(old, new)) == new.nbytes + 1

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @pytest.mark.parametrize("at", [[0], [-1], [0, -1], [255], [256], [65_535, 65_536], [0, 70_000], [1, 257]])
    def test_changes_at_the_ends_and_beyond_each_plane_of_a_gap(self, itemsize: int, at: list[int]) -> None:
        old = random_bits(150_001, itemsize)
        new = old.copy()
        new[at] += new.dtype.type(1)
        assert len(round_trip(old, new)) < 64

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_a_gap_as_long_as_a_segment(self, itemsize: int) -> None:
        size = SEGMENT_BYTES // itemsize
        old = random_bits(size, itemsize)
        new = old.copy()
        new[-1] ^= new.dtype.type(1)
        assert len(round_trip(old, new)) < 64

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_a_tensor_of_several_segments_of_which_one_is_unchanged_and_one_is_new(self, itemsize: int) -> None:
        size = 2 * SEGMENT_BYTES // itemsize
        old = random_bits(size + 5, itemsize)
        new = old.copy()
        new[size // 2 : size] = random_bits(size // 2, itemsize, seed=2)
        new[-2] -= new.dtype.type(1)
        encoded = round_trip(old, new)
        assert encoded[0] == 0 and encoded[1] == 2 and encoded[2 + SEGMENT_BYTES] in (1, 2)

    def test_signs_and_payloads_of_nan_and_infinity_are_bits_like_others(self) -> None:
        special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001], "<u2")
        old = np.resize(random_bits(1000, 2), 1000)
        for value in special:
            new = old.copy()
            new[:: special.size * 11] = value
            round_trip(old, new)
            round_trip(new, old)

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_the_largest_steps_wrap_around(self, itemsize: int) -> None:
        old = np.zeros(64, f"<u{itemsize}")
        for step in (256**itemsize - 1, 256**itemsize // 2, 256**itemsize // 2 - 1):
            new = old.copy()
            new[5] = step
            round_trip(old, new)
            round_trip(new, old)

    def test_tensors_of_different_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="a tensor of 3 bytes does not become one of 4"):
            encode(memoryview(bytes(3)), memoryview(bytes(4)), 1)


@pytest.mark.parametrize(("itemsize", "share"), [(1, 0.003), (2, 0.02), (1, 0.05)])
def test_the_bytes_are_close_to_the_entropy(itemsize: int, share: float) -> None:
    old = random_bits(4 << 20, itemsize)
    rng = np.random.default_rng(3)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < share)
    new[at] += rng.choice(np.array([-1, 1]).astype(old.dtype), at.size)
    of_positions = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    bits_per_change = 8 * len(round_trip(old, new)) / at.size
    up_or_down = 1
    assert bits_per_change < 1.15 * (of_positions + up_or_down)


@pytest.mark.parametrize(("share", "is_stored"), [(0.003, True), (0.02, True), (0.05, False)])
def test_lowest_bytes_of_gaps_are_stored_where_a_code_saves_little(share: float, is_stored: bool) -> None:
    old = random_bits(4 << 20, 1)
    new = old + (np.random.default_rng(3).random(old.size) < share).astype(old.dtype)
    encoded = round_trip(old, new)
    _, count, length, *_ = HEADER.unpack_from(encoded)
    assert encoded[HEADER.size] == (STORED if is_stored else DEFLATED)
    assert length == 1 + count if is_stored else length < 0.88 * count


@pytest.mark.parametrize(
    ("steps", "most_bits"),
    [
        ({1: 1.0}, 0.01),  # one value: no bit for each
        ({1: 0.5, -1: 0.5}, 1.01),
        ({1: 0.995, -1: 0.005}, 0.25),  # the second one is listed
        ({1: 0.49, -1: 0.49, 2: 0.01, -3: 0.01}, 1.9),
    ],
)
def test_differences_that_are_nearly_all_two_steps_take_a_bit_each(steps: dict[int, float], most_bits: float) -> None:
    old = random_bits(1 << 20, 1)
    rng = np.random.default_rng(3)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < 0.02)
    new[at] += rng.choice(np.array(list(steps)), at.size, p=list(steps.values())).astype(old.dtype)
    encoded = round_trip(old, new)
    _, count, *lengths = HEADER.unpack_from(encoded)
    assert encoded[HEADER.size + sum(lengths[:3])] == TWO_VALUES
    assert 8 * lengths[3] < most_bits * count


def test_many_exceptions_are_deflated() -> None:
    old = random_bits(1 << 20, 1)
    rng = np.random.default_rng(3)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < 0.02)
    new[at] += rng.choice(np.array([1, -1, 2]), at.size, p=[0.45, 0.45, 0.1]).astype(old.dtype)
    encoded = round_trip(old, new)
    lengths = HEADER.unpack_from(encoded)[2:]
    assert encoded[HEADER.size + sum(lengths[:3])] == DEFLATED


def geometric(rng: np.random.Generator, size: int, share: float) -> Bits:
    """The lowest bytes of gaps, where a share of all elements changes."""
    return (rng.geometric(share, size) - 1).astype(np.uint8)


def of_values(rng: np.random.Generator, size: int, shares: dict[int, float]) -> Bits:
    return rng.choice(np.array(list(shares), np.uint8), size, p=list(shares.values()))


def mostly_zeros(rng: np.random.Generator, size: int, share: float) -> Bits:
    """Of which a share is anything else."""
    return np.where(rng.random(size) < share, rng.integers(1, 256, size), 0).astype(np.uint8)


def hidden(rng: np.random.Generator, size: int) -> Bits:
    """Two values at every place that may be sampled, and anything in between."""
    plane = rng.integers(0, 256, size, np.uint8)
    counted = plane[:: size // 4096]
    counted[:] = of_values(rng, counted.size, {1: 0.5, 2: 0.5})
    return plane


PLANES: dict[str, tuple[int | None, int, int, Callable[[np.random.Generator, int], Bits]]] = {
    "zeros": (None, 1, 20_000, lambda rng, size: np.zeros(size, np.uint8)),
    "few bytes": (DEFLATED, 1, 1023, lambda rng, size: of_values(rng, size, {1: 0.5, 2: 0.5})),
    "uniform": (STORED, 1024, 20_000, lambda rng, size: rng.integers(0, 256, size, np.uint8)),
    "gaps, 2%": (STORED, 4096, 40_000, lambda rng, size: geometric(rng, size, 0.02)),
    "gaps, 5%": (DEFLATED, 4096, 40_000, lambda rng, size: geometric(rng, size, 0.05)),
    "one value": (TWO_VALUES, 1024, 20_000, lambda rng, size: np.full(size, rng.integers(1, 256), np.uint8)),
    "rare others": (TWO_VALUES, 1024, 20_000, lambda rng, size: mostly_zeros(rng, size, 0.006)),
    "many others": (DEFLATED, 4096, 20_000, lambda rng, size: mostly_zeros(rng, size, 0.08)),
    "two values": (TWO_VALUES, 1024, 20_000, lambda rng, size: of_values(rng, size, {1: 0.5, 2: 0.5})),
    "the larger more often": (TWO_VALUES, 1024, 20_000, lambda rng, size: of_values(rng, size, {7: 0.2, 250: 0.8})),
    "two values and rare others": (
        TWO_VALUES,
        4096,
        20_000,
        lambda rng, size: of_values(rng, size, {255: 0.7, 0: 0.29, 3: 0.006, 9: 0.004}),
    ),
    "a mix": (DEFLATED, 4096, 20_000, lambda rng, size: of_values(rng, size, {1: 0.47, 2: 0.48, 3: 0.04, 9: 0.01})),
    "others where none is counted": (DEFLATED, 16_384, 40_000, hidden),
}
"""How a plane is coded (None: left out), of how many bytes, and what makes one."""


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numba, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(delta_planes, "_compiled", lambda: None)
    else:
        assert delta_planes._compiled() is not None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_how_a_plane_is_coded_and_that_it_comes_back(name: str, itemsize: int) -> None:
    kind, least, most, make = PLANES[name]
    for seed in range(12):
        rng = np.random.default_rng(seed)
        size = (least, most)[seed] if seed < 2 else int(rng.integers(least, most, endpoint=True))
        planes = np.stack([make(rng, size) for _ in range(3 + itemsize)])
        encoded = delta.encode_planes(planes, SEGMENT_BYTES)
        assert encoded is not None
        lengths = struct.unpack_from(f"<{3 + itemsize}I", encoded, 5)
        starts = 5 + 4 * len(lengths) + np.cumsum([0, *lengths[:-1]])
        assert {encoded[start] if length else None for start, length in zip(starts, lengths, strict=True)} == {kind}
        read = delta.Segment(0, slice(0, SEGMENT_BYTES), memoryview(encoded))
        count, back = delta.inflated(read, itemsize)
        assert count == size
        assert back == [plane.tobytes() if kind is not None else b"" for plane in planes]


@pytest.mark.parametrize("name", PLANES)
def test_compiled_loops_and_numpy_make_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, least, most, make = PLANES[name]
    for seed in range(24):
        rng = np.random.default_rng(seed)
        plane = make(rng, int(rng.integers(least, most, endpoint=True)))
        with monkeypatch.context() as without:
            without.setattr(delta_planes, "_compiled", lambda: None)
            expected = delta_planes.coded(plane)
        assert delta_planes.coded(plane) == expected


def deflated(values: bytes) -> bytes:
    """A plane."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return bytes([DEFLATED]) + deflate.compress(values) + deflate.flush()


def of_two(first: int, second: int, exceptions: int, rest: bytes) -> bytes:
    """A plane."""
    return struct.pack("<BBBI", TWO_VALUES, first, second, exceptions) + rest


def segment(count: int, *planes: bytes, lengths: list[int] | None = None) -> bytes:
    """A changed segment of bytes, sound or not."""
    return HEADER.pack(1, count, *(lengths or map(len, planes))) + b"".join(planes)


@pytest.mark.usefixtures("way")
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
            (segment(1, deflated(b"\x64"), b"", b"", deflated(b"\x01")), "last change is at element 100 of 100"),
            (segment(1, b"", b"", deflated(b"\xff"), b""), "last change is at element 16711680 of 100"),
            (segment(2, deflated(b"\x60\x03"), b"", b"", b""), "last change is at element 100 of 100"),
            (segment(1, b"\x00\xff\xff", b"", b"", b""), "invalid block type|Error -3"),
            (segment(1, b"\x03\x01", b"", b"", b""), "plane 0 does not decode to 1 bytes"),
            (segment(3, b"\x01" + bytes(2), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, b"\x01" + bytes(4), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 2, 0, b"\x40")[:6], b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 2, 0, b""), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 2, 0, b"\x40\x00"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 1, 0, b"\x40"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 1, 1, b"\x03\0\0\0\x05"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 1, 2, b"\x01\0\0\0\x05"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 1, 2**32 - 1, b""), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 1, 4, bytes(4 * 5)), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 2, 1, b"\x40\x03\0\0\0\x05"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(3, of_two(1, 2, 1, b"\x40\0\0\0\0\x05\0"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(9, of_two(1, 2, 0, b"\x40"), b"", b"", b""), "plane 0 does not decode to 9 bytes"),
            (segment(1, deflated(b"\x01\x02"), b"", b"", b""), "plane 0 does not decode to 1 bytes"),
            (segment(3, deflated(b"\x01\x02"), b"", b"", b""), "plane 0 does not decode to 3 bytes"),
            (segment(1, deflated(b"\x01")[:-1], b"", b"", b""), "plane 0 does not decode to 1 bytes"),
            (segment(1, deflated(b"\x01") + b"\x00", b"", b"", b""), "plane 0 does not decode to 1 bytes and end"),
            (
                segment(1, b"", b"", b"", b"\x00" + zlib.compress(bytes(1 << 20), 9, -15)),
                "plane 0 does not decode to 1 bytes",
            ),
        ],
    )
    def test_what_is_no_encoding_is_refused(self, encoded: bytes, complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            apply(memoryview(encoded), memoryview(bytearray(100)), 1)

    def test_a_plane_is_not_decompressed_beyond_its_numbers(self) -> None:
        asked: list[int] = []
        decompress = zlib.decompressobj

        class Watched:
            def __init__(self, wbits: int) -> None:
                self._inflate = decompress(wbits)

            def decompress(self, data: bytes, most: int) -> bytes:
                asked.append(most)
                return self._inflate.decompress(data, most)

            eof = True
            unused_data = b""

        bomb = segment(1, b"", b"", b"", b"\x00" + zlib.compress(bytes(64 << 20), 9, -15))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta.zlib, "decompressobj", Watched)
            with pytest.raises(ValueError, match="does not decode"):
                apply(memoryview(bomb), memoryview(bytearray(100)), 1)
        assert asked == [2]

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    @given(data=st.data())
    def test_whatever_is_damaged_or_cut_off_raises_nothing_but_value_errors(
        self, itemsize: int, data: st.DataObject
    ) -> None:
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
