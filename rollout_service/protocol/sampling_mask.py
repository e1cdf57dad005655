"""The tokens that truncated sampling kept at each position, packed for replies. Needs only numpy.

A chunk is base64 of zlib of a table of 32-bit numbers. The table has the number of tokens, then the number of kept ids
for each token, then all kept ids. The ids of a position ascend, each stored as the difference from the one before. The
table is stored plane by plane: the lowest byte of every number, little-endian, then the second byte of every number,
and so on. A completion that several engines generated has one chunk from each, in order.
"""

import base64
import binascii
import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LEVEL = 1
"""zlib's fastest level: higher ones save a few percent at several times the time."""

Ids = npt.NDArray[np.int64]


def pack(kept: Sequence[Sequence[int]]) -> str:
    """Pack the kept ids of some tokens into one chunk; the ids of each token ascend."""
    counts = np.fromiter(map(len, kept), np.int64, len(kept))
    ids = np.fromiter(itertools.chain.from_iterable(kept), np.int64, int(counts.sum()))
    table = np.concatenate([[len(kept)], counts, _differences(ids, counts)]).astype("<u4")
    planes = table.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode()


def repack(chunks: Sequence[str], start: int, end: int) -> tuple[str, ...]:
    """Return the ids of tokens ``[start, end)`` in one chunk. Raises ValueError for invalid chunks."""
    counts, ids = unpack(chunks)
    kept = np.split(ids, np.cumsum(counts)[:-1]) if len(counts) else []
    return (pack([each.tolist() for each in kept[start:end]]),) if kept[start:end] else ()


def unpack(chunks: Sequence[str]) -> tuple[Ids, Ids]:
    """Return the number of kept ids for each token, [tokens], and all ids in order, [sum of counts]; both int64.

    Raises ValueError for invalid chunks.
    """
    parts = [_unpack(chunk) for chunk in chunks]
    empty = np.zeros(0, np.int64)
    return (
        np.concatenate([empty, *(counts for counts, _ in parts)]),
        np.concatenate([empty, *(ids for _, ids in parts)]),
    )


def _unpack(chunk: str) -> tuple[Ids, Ids]:
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
    """Return each id minus the one before at the same position. Raises ValueError if they do not ascend."""
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
    """Return the index of the first id of each token that has ids."""
    return (np.cumsum(counts) - counts)[counts > 0]
