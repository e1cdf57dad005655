"""Which bytes of a version are staged, and where: held against the same bytes picked one by one."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engine.loading.placement import Move, Placement, Span, batches, whole_span
from rollout_service.protocol.tensors import STORED_DTYPE_BYTES, StoredDtype
from rollout_service.store.manifest import (
    CHUNK_BYTES,
    Manifest,
    Recipe,
    StoredTensor,
)
from rollout_service.store.reading import Piece, pieces


def tensor(name: str, nbytes: int, offset: int, dtype: StoredDtype = "float8_e4m3fn", file: str = "1") -> StoredTensor:
    shape = (nbytes // STORED_DTYPE_BYTES[dtype],)
    return StoredTensor(name=name, dtype=dtype, shape=shape, file=file, offset=offset, nbytes=nbytes, digest="aa")


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
    cut = [
        StoredTensor(name="t", dtype="float8_e4m3fn", shape=(size,), file="1", offset=7, nbytes=size, digest="aa")
    ] * -(-size // chunk_bytes)
    chunks = [
        (each, next(each.chunks())._replace(start=start, nbytes=min(chunk_bytes, size - start)))
        for each, start in zip(cut, range(0, size, chunk_bytes), strict=True)
    ]
    placement = Placement(spans)
    area = moved(placement, list(pieces(chunks, most_bytes)), data)
    for span, place in placement.places.items():
        rows = [7 + span.start + row * span.stride_bytes for row in range(span.rows)]
        assert area[place : place + span.nbytes] == b"".join(data[first : first + span.row_bytes] for first in rows)


def test_neighbours_in_the_file_are_one_move_into_the_area():
    manifest = version(tensor("a", 32, 8), tensor("b", 64, 40), tensor("c", 20, 104), tensor("d", 16, 124))
    placement = Placement.whole(manifest)
    [piece] = pieces(placement.chunks(manifest, every=True), 1000)
    assert (piece.offset, piece.nbytes) == (8, 132)
    # after c, whose size is no multiple of 16, d begins at the next one
    assert placement.moves(piece) == [Move(0, 0, 116, 1, 0), Move(116, 128, 16, 1, 0)]


def test_a_rank_reads_the_chunks_of_its_own_spans_and_rank_0_all():
    manifest = version(tensor("a", 32, 8), tensor("b", 64, 40), tensor("c", 16, 104))
    placement = Placement([Span("a", 8, 8), Span("c", 0, 16)])
    assert [t.name for t, _ in placement.chunks(manifest, every=False)] == ["a", "c"]
    assert [t.name for t, _ in placement.chunks(manifest, every=True)] == ["a", "b", "c"]
    found = list(pieces(placement.chunks(manifest, every=False), 1000))
    assert [(piece.offset, piece.nbytes) for piece in found] == [(8, 32), (104, 16)]


def test_only_the_chunks_of_a_tensor_that_hold_a_span_are_read():
    from rollout_service.store.manifest import tensor_digests

    data = bytes(3 * CHUNK_BYTES + 5)
    digest, chunk_digests = tensor_digests(memoryview(data))
    large = msgspec.structs.replace(tensor("a", len(data), 0), digest=digest, chunk_digests=chunk_digests)
    placement = Placement([Span("a", CHUNK_BYTES + 3, 10), Span("a", 3 * CHUNK_BYTES, 5)])
    chunks = [chunk for _, chunk in placement.chunks(version(large), every=False)]
    assert [(chunk.start, chunk.nbytes) for chunk in chunks] == [(CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 5)]


def test_equal_spans_lie_once():
    placement = Placement([Span("a", 0, 24), Span("a", 0, 24), Span("b", 0, 8)])
    assert placement.places == {Span("a", 0, 24): 0, Span("b", 0, 8): 32} and placement.nbytes == 48


def test_tensors_are_batched_where_each_is_aligned_for_its_dtype():
    odd = [tensor("a", 3, 8), tensor("b", 8, 11, "float32"), tensor("c", 4, 19, "bfloat16"), tensor("d", 4, 23)]
    batched = [[t.name for t, _ in piece.chunks] for piece in batches(odd, 1000)]
    assert batched == [["a"], ["b", "c", "d"]]
    assert [piece.nbytes for piece in batches(odd, 12)] == [3, 12, 4]
    assert [whole_span(t).nbytes for t in odd] == [3, 8, 4, 4]


def test_where_a_piece_goes_is_worked_out_once_in_each_placement():
    manifest = version(tensor("a", 700, 0), tensor("b", 900, 700))
    placement = Placement.whole(manifest)
    one, again = (list(pieces(placement.chunks(manifest, every=True), 1000)) for _ in range(2))
    assert [placement.moves(piece) for piece in one] == [placement.moves(piece) for piece in again]
    assert all(placement.moves(piece) is placement.moves(piece) for piece in one)
    assert Placement.whole(manifest).moves(one[0]) is not placement.moves(one[0])
