"""Which bytes of a version are staged, and where: held against the same bytes picked one by one."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engine.loading.placement import Move, Placement, Span, whole_span
from rollout_service.store.manifest import CHUNK_BYTES, Manifest, Recipe, StoredTensor, tensor_digests
from rollout_service.store.reading import Piece, pieces


def tensor(name: str, nbytes: int, offset: int) -> StoredTensor:
    return StoredTensor(name, "float8_e4m3fn", (nbytes,), "1", offset, nbytes, "aa")


def version(*tensors: StoredTensor) -> Manifest:
    return Manifest(version=1, fingerprint="model", recipe=Recipe(weights="none"), tensors=tensors)


def moved(placement: Placement, found: list[Piece], data: bytes) -> bytes:
    """The area after every piece of the one file with these bytes."""
    area = bytearray(b"?" * placement.nbytes)
    for piece in found:
        memory = data[piece.offset : piece.offset + piece.nbytes]
        for m in placement.moves(piece):
            for row in range(m.rows):
                source, target = m.source + row * m.stride_bytes, m.target + row * m.row_bytes
                assert source >= 0 and source + m.row_bytes <= len(memory)
                area[target : target + m.row_bytes] = memory[source : source + m.row_bytes]
    return bytes(area)


SPANS = st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9), st.integers(0, 12)).map(
    lambda d: Span("t", d[0], d[1], d[2], d[1] + d[3] if d[2] > 1 else 0)
)


@settings(deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=4), st.integers(1, 50), st.integers(1, 60))
def test_spans_arrive_whole_however_their_tensor_is_cut(spans, chunk_bytes, most_bytes):
    size = max(span.end for span in spans)
    data = random.Random(size).randbytes(7 + size)
    whole = tensor("t", size, 7)
    chunks = [
        (whole, next(whole.chunks())._replace(start=start, nbytes=min(chunk_bytes, size - start)))
        for start in range(0, size, chunk_bytes)
    ]
    placement = Placement(spans)
    area = moved(placement, list(pieces(chunks, most_bytes)), data)
    for span, place in placement.places.items():
        rows = [7 + span.start + row * span.stride_bytes for row in range(span.rows)]
        assert area[place : place + span.nbytes] == b"".join(data[first : first + span.row_bytes] for first in rows)


def test_neighbours_in_the_file_are_one_move_worked_out_once():
    manifest = version(tensor("a", 32, 8), tensor("b", 64, 40), tensor("c", 20, 104), tensor("d", 16, 124))
    placement = Placement([*Placement.whole(manifest).places, whole_span(manifest.tensors[0])])  # equal spans lie once
    [piece] = pieces(placement.chunks(manifest, every=True), 1000)
    assert (piece.offset, piece.nbytes) == (8, 132)
    # after c, whose size is no multiple of 16, d begins at the next one
    assert placement.moves(piece) == [Move(0, 0, 116, 1, 0), Move(116, 128, 16, 1, 0)]
    assert placement.moves(piece) is placement.moves(piece) is not Placement.whole(manifest).moves(piece)


def test_a_rank_reads_the_chunks_of_its_own_spans_and_rank_0_all():
    manifest = version(tensor("a", 32, 8), tensor("b", 64, 40), tensor("c", 16, 104))
    placement = Placement([Span("a", 8, 8), Span("c", 0, 16)])
    assert [t.name for t, _ in placement.chunks(manifest, every=False)] == ["a", "c"]
    assert [t.name for t, _ in placement.chunks(manifest, every=True)] == ["a", "b", "c"]
    found = list(pieces(placement.chunks(manifest, every=False), 1000))
    assert [(piece.offset, piece.nbytes) for piece in found] == [(8, 32), (104, 16)]


def test_only_the_chunks_of_a_tensor_that_hold_a_span_are_read():
    data = bytes(3 * CHUNK_BYTES + 5)
    digest, chunk_digests = tensor_digests(memoryview(data))
    large = msgspec.structs.replace(tensor("a", len(data), 0), digest=digest, chunk_digests=chunk_digests)
    placement = Placement([Span("a", CHUNK_BYTES + 3, 10), Span("a", 3 * CHUNK_BYTES, 5)])
    chunks = [chunk for _, chunk in placement.chunks(version(large), every=False)]
    assert [(chunk.start, chunk.nbytes) for chunk in chunks] == [(CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 5)]
