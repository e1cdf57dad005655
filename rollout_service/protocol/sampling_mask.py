"""The tokens that truncated sampling left for each position, packed for replies. Needs numpy only.

A chunk is base64 of zlib of a table of 32-bit numbers: how many tokens it is about, how many ids were kept for each,
then all kept ids, those of a position in ascending order and each less the one before. The table is stored plane by
plane: the lowest byte of every number, little-endian, then the second of every number, and so on. A completion that
several engines made has a chunk of each, in order.
"""

import base64
import binascii
import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LEVEL = 1
"""zlib's fastest: higher ones save a few percent at several times the time."""

Ids = npt.NDArray[np.int64]


def pack(kept: Sequence[Sequence[int]]) -> str:
    """One chunk of the ids that were kept for each of some tokens, ascending for each."""
    counts = np.fromiter(map(len, kept), np.int64, len(kept))
    ids = np.fromiter(itertools.chain.from_iterable(kept), np.int64, int(counts.sum()))
    table = np.concatenate([[len(kept)], counts, _differences(ids, counts)]).astype("<u4")
    planes = table.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode()


def repacked(chunks: Sequence[str], start: int, end: int) -> tuple[str, ...]:
    """The ids of tokens ``[start, end)`` alone, in one chunk. Raises ValueError for what ``pack`` did not make."""
    counts, ids = unpack(chunks)
    kept = np.split(ids, np.cumsum(counts)[:-1]) if len(counts) else []
    return (pack([each.tolist() for each in kept[start:end]]),) if kept[start:end] else ()


def unpack(chunks: Sequence[str]) -> tuple[Ids, Ids]:
    """How many ids were kept for each token, [tokens], and all of them in order, [sum of those]; both int64.

    Raises ValueError for what ``pack`` did not make.
    """
    parts = [_unpacked(chunk) for chunk in chunks]
    empty = np.zeros(0, np.int64)
    return (
        np.concatenate([empty, *(counts for counts, _ in parts)]),
        np.concatenate([empty, *(ids for _, ids in parts)]),
    )


def _unpacked(chunk: str) -> tuple[Ids, Ids]:
    try:
        planes = zlib.decompress(base64.b64decode(chunk, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"a chunk of a sampling mask is no base64 of zlib data: {error}") from error
    if len(planes) < 4 or len(planes) % 4:
        raise ValueError(f"a chunk of a sampling mask has {len(planes)} bytes, not those of some 32-bit numbers")
    table = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(4, -1).T).view("<u4")[:, 0].astype(np.int64)
    tokens = int(table[0])
    counts, differences = table[1 : 1 + tokens], table[1 + tokens :]
    if len(counts) != tokens or int(counts.sum()) != len(differences):
        raise ValueError(
            f"a chunk of a sampling mask is of {tokens} tokens, and its {len(table)} numbers do not fit that"
        )
    return counts, _sums(differences, counts)


def _differences(ids: Ids, counts: Ids) -> Ids:
    """Each id less the one before at the same position. Raises ValueError if they do not ascend."""
    differences = np.diff(ids, prepend=0)
    starts = _starts(counts)
    differences[starts] = ids[starts]
    follows = np.ones(len(ids), bool)
    follows[starts] = False
    if (differences < 0).any() or (differences[follows] == 0).any():
        raise ValueError("the ids that were kept for a token must ascend and not be negative")
    return differences


def _sums(differences: Ids, counts: Ids) -> Ids:
    sums = np.cumsum(differences)
    before = np.concatenate([[0], sums])[np.cumsum(counts) - counts]
    ids: Ids = sums - np.repeat(before, counts)
    return ids


def _starts(counts: Ids) -> Ids:
    """Where the ids of each token begin that has any."""
    return (np.cumsum(counts) - counts)[counts > 0]
