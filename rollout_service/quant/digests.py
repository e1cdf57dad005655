"""Compute xxh3-128 of many byte ranges on a GPU, at memory speed, for the digests of a manifest's chunks.

xxh3 reads an input of more than 240 bytes in blocks of 1024 bytes, each of 16 stripes of 64. It keeps eight 64-bit
sums, and the values added for a stripe do not depend on them. A program of one warp therefore adds a block's stripes in
parallel; only the step after each block (``scramble``) is sequential. Chunks of at most 1 MiB are numerous enough to
keep a GPU busy. The host does the last step, 128 bits from eight sums, for all chunks at once.

xxh3 hashes shorter inputs in another way, and the host does that. Format:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash

from rollout_service.gpu.grouped_copy import numbered
from rollout_service.gpu.streams import on_device, queue_to_host, queued_to

Words = npt.NDArray[np.uint64]

MIN_BYTES = 241
"""Minimum size in bytes of a range that is hashed on the GPU."""
DIGEST_BYTES = 16

_UNROLLED = 8
"""Number of blocks that are loaded at once, to hide memory latency."""
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_P64_3, _P64_4, _P64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_AVALANCHE = 0x165667919E3779F9
_SUMS = (_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1)
"""Initial values of the eight sums."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""xxh3's default secret, for seed 0."""


class Run(NamedTuple):
    """A range of bytes to be hashed."""

    address: int
    nbytes: int


Runs: TypeAlias = Sequence[Run] | npt.NDArray[np.int64]
"""Ranges, or their addresses and sizes in bytes, int64 [runs, 2]."""


def _words(start: int, count: int) -> list[int]:
    return [int.from_bytes(_SECRET[start + 8 * i : start + 8 * i + 8], "little") for i in range(count)]


_TABLE = np.array([*_words(0, 24), *_words(len(_SECRET) - 71, 8), *_SUMS], np.uint64).view(np.int64)
"""Constants of the kernel: words s to s + 8 for stripe s of a block, words 16 to 24 for ``scramble``, words 24 to 32
for the last stripe, and the sums' initial values."""


class Hashing:
    """Digests of ranges in GPU memory, in groups that are hashed when their bytes are there.

    ``groups``: each has ranges, or int64 [runs, 2] of their addresses and sizes. ``device``: the CPU in Triton's
    interpreter. Raises RuntimeError if the kernel's results differ from xxhash on the device, which is tested once per
    process; ``is_self_test``: this is that test.
    """

    def __init__(self, groups: Sequence[Runs], device: torch.device, *, is_self_test: bool = False) -> None:
        if not is_self_test:
            _require_equal_digests(device)
        of_groups = [np.asarray(group, np.int64).reshape(-1, 2) for group in groups]
        runs = np.concatenate(of_groups) if of_groups else np.empty((0, 2), np.int64)
        self._lengths = runs[:, 1].astype(np.uint64)
        self._is_long = runs[:, 1] >= MIN_BYTES
        kinds = 2 * np.repeat(np.arange(len(of_groups)), list(map(len, of_groups))) + (runs[:, 0] % 8 != 0)
        long = np.flatnonzero(self._is_long)
        order = np.argsort(kinds[long], kind="stable")
        ends = np.searchsorted(kinds[long][order], np.arange(2 * len(of_groups)), "right").tolist()
        self._launches: list[list[tuple[slice, bool]]] = [[] for _ in of_groups]
        """Rows of the table for each group, and True if their ranges are aligned."""
        for kind, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                self._launches[kind // 2].append((slice(start, end), kind % 2 == 0))
        made = len(long)
        table = np.empty((made, 3), np.int64)
        table[:, :2], table[:, 2] = runs[long[order]], order
        self._table = queued_to(device, torch.from_numpy(table))
        self._words = _words_on(device)
        self._sums = torch.empty((made, 8), dtype=torch.int64, device=device)
        self._on_host: torch.Tensor | None = None

    def queue(self, group: int) -> None:
        """Hash a group on the device's current stream. The bytes must not change until the stream has read them."""
        device = self._table.device
        with on_device(device):
            for rows, is_aligned in self._launches[group]:
                table = self._table[rows]
                add_up[(len(table),)](
                    table, self._words, self._sums, ALIGNED=is_aligned, UNROLLED=_UNROLLED, num_warps=1
                )  # fmt: skip

    def collect(self) -> None:
        """Queue on the current stream the copy of the results to the host, after all groups were queued.

        Synchronize with the stream before ``read``.
        """
        self._on_host = queue_to_host(self._sums)

    def read(self, short: Callable[[int], memoryview]) -> bytes:
        """Return ``DIGEST_BYTES`` of each range, concatenated, equal to those of ``xxhash.xxh3_128_digest``.

        All groups must have been queued on the current stream, or on others with which the caller has synchronized.
        ``short``: returns the bytes of a range on the host, by its number; called for ranges smaller than
        ``MIN_BYTES``.
        """
        found = np.empty((len(self._lengths), DIGEST_BYTES), np.uint8)
        summed = self._sums.cpu() if self._on_host is None else self._on_host
        sums, lengths = summed.numpy().view(np.uint64), self._lengths[self._is_long]
        begins = np.stack([~(lengths * np.uint64(_P64_2)), lengths * np.uint64(_P64_1)], axis=1)
        found[self._is_long] = _merge(sums, begins).astype(">u8", order="C").view(np.uint8)
        for number in np.flatnonzero(~self._is_long).tolist():
            found[number] = np.frombuffer(xxhash.xxh3_128_digest(short(number)), np.uint8)
        return found.tobytes()


Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


def chunks_of(nbytes: Integers, chunk_bytes: int) -> tuple[Integers, Integers, Integers]:
    """Split pieces of these sizes into chunks, in order. Return the piece, the offset in it, and the size in bytes of
    each chunk."""
    piece, number = numbered(-(-nbytes // chunk_bytes))
    start = number * chunk_bytes
    return piece, start, np.minimum(chunk_bytes, nbytes[piece] - start)


@cache
def _words_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_TABLE).to(device)


_testing = threading.Lock()
_tried: set[torch.device] = set()


def _require_equal_digests(device: torch.device) -> None:
    """Raise RuntimeError if the kernel's results differ from xxhash on ``device``. Tested once per process."""
    with _testing:
        if device in _tried:
            return
        data = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
        there = torch.from_numpy(data).to(device)
        places = [(0, 20_000), (8, 1024), (16, 1025), (3, 4096), (7, 241), (5, 10_000), (9, 12)]
        held = [data[start : start + nbytes].data for start, nbytes in places]
        runs = [Run(there.data_ptr() + start, nbytes) for start, nbytes in places]
        hashing = Hashing([runs], device, is_self_test=True)
        hashing.queue(0)
        if hashing.read(held.__getitem__) != b"".join(map(xxhash.xxh3_128_digest, held)):
            raise RuntimeError(
                f"the hash kernel on {device} gives other digests than xxhash: report this, with the GPU and the driver"
            )
        _tried.add(device)


_HALVES = np.array([_words(len(_SECRET) - 64 - 11, 8), _words(11, 8)], np.uint64)
"""[2, 8]: keys that are combined with the sums for the upper 64 bits of a digest, and for the lower ones."""


def _merge(sums: Words, begins: Words) -> Words:
    """Return uint64 [runs, 2], the upper and the lower half of each digest, from sums [runs, 8] and initial values."""
    keyed = sums[:, None] ^ _HALVES
    merged: Words = begins + _folded_product(keyed[..., 0::2], keyed[..., 1::2]).sum(axis=2, dtype=np.uint64)
    merged ^= merged >> np.uint64(37)
    merged *= np.uint64(_AVALANCHE)
    merged ^= merged >> np.uint64(32)
    return merged


def _folded_product(a: Words, b: Words) -> Words:
    """Return the lower half of the 128 bits of a · b, xor the upper half."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    other = a_low * b_high + (middle & mask)
    high: Words = a_high * b_high + (middle >> half) + (other >> half)
    high ^= a * b
    return high


@triton.jit(do_not_specialize_on_alignment=["runs"])  # otherwise it is compiled again for tables with another alignment
def add_up(runs, words, sums, ALIGNED: tl.constexpr, UNROLLED: tl.constexpr):
    """Compute the eight sums of each range; grid: (runs,).

    ``runs`` int64 [runs, 3]: address, size in bytes, and row in ``sums``, int64 [all runs, 8]. ``words`` int64:
    ``_TABLE``. ``ALIGNED``: every address is a multiple of 8.
    """
    entry = runs + 3 * tl.program_id(0)
    address, nbytes, row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    places = 64 * stripe[:, None] + 8 * lane[None, :]
    swapped = 64 * stripe[:, None] + 8 * (lane ^ 1)[None, :]
    keys = tl.load(words + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    scrambling = tl.load(words + 16 + lane).to(tl.uint64, bitcast=True)
    found = tl.load(words + 32 + lane).to(tl.uint64, bitcast=True)

    blocks = (nbytes - 1) // 1024
    unrolled = blocks // UNROLLED
    for several in range(unrolled):
        for one in tl.static_range(UNROLLED):
            start = address + (several * UNROLLED + one) * 1024
            found = _scrambled(found + _of_stripes(start, places, swapped, keys, ALIGNED), scrambling)
    for block in range(unrolled * UNROLLED, blocks):
        found = _scrambled(found + _of_stripes(address + block * 1024, places, swapped, keys, ALIGNED), scrambling)

    rest = (nbytes - 1 - blocks * 1024) // 64
    if rest > 0:
        inside = (stripe < rest)[:, None] & (lane >= 0)[None, :]
        start = address + blocks * 1024
        mine = _words_at(start + places, inside, ALIGNED)
        others = _words_at(start + swapped, inside, ALIGNED)
        product = tl.where(inside, _product(mine ^ keys), 0)
        found += tl.sum(product + others, 0)

    last = address + nbytes - 64
    everywhere = lane >= 0
    keys_of_last = tl.load(words + 24 + lane).to(tl.uint64, bitcast=True)
    found += _product(_words_at(last + 8 * lane, everywhere, False) ^ keys_of_last)
    found += _words_at(last + 8 * (lane ^ 1), everywhere, False)
    tl.store(sums + 8 * row + lane, found.to(tl.int64, bitcast=True))


@triton.jit
def _of_stripes(start, places, swapped, keys, ALIGNED: tl.constexpr):
    """Return the contribution of 16 stripes to the sums, uint64 [8]."""
    everywhere = places >= 0
    product = _product(_words_at(start + places, everywhere, ALIGNED) ^ keys)
    return tl.sum(product + _words_at(start + swapped, everywhere, ALIGNED), 0)


@triton.jit
def _words_at(addresses, inside, ALIGNED: tl.constexpr):
    """Load uint64, little-endian; 0 where not ``inside``. Without ``ALIGNED``, combine the two words that contain the
    bytes."""
    if ALIGNED:
        pointers = addresses.to(tl.pointer_type(tl.int64))
        return tl.load(pointers, mask=inside, other=0).to(tl.uint64, bitcast=True)
    skipped = (addresses & 7) * 8
    pointers = (addresses - (addresses & 7)).to(tl.pointer_type(tl.int64))
    low = tl.load(pointers, mask=inside, other=0).to(tl.uint64, bitcast=True)
    # for an aligned address, the second word is not needed, and may lie outside of the memory
    high = tl.load(pointers + 1, mask=inside & (skipped > 0), other=0).to(tl.uint64, bitcast=True)
    shift = skipped.to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _product(keyed):
    # spelled so that the compiler multiplies 32 bits by 32
    return keyed.to(tl.uint32).to(tl.uint64) * (keyed >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def _scrambled(sums, keys):
    return (sums ^ (sums >> 47) ^ keys) * 0x9E3779B1
