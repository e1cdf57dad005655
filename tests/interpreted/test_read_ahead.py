"""What a worker copies of an upload before it is committed, and what it must still read afterwards."""

import queue
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollout_service.engine.loading import read_ahead
from rollout_service.engine.loading.device_staging import copy_and_hash
from rollout_service.engine.loading.placement import Placement, Span
from rollout_service.engine.loading.read_ahead import CopyPieces, ReadAhead
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store import manifest as manifest_module
from rollout_service.store import reading
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import Piece, VersionReader, pieces
from tests.interpreted.in_memory import Upload, log_memory

pytestmark = pytest.mark.usefixtures("host_digests")
CHUNK, PASSAGE = 1000, 2048
SHAPES = {"first": (5, 7), "matrix": (60, 100), "small": (1, 20), "last": (30, 41), "end": (3000,)}
WAIT_S = 60


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightLog:
    for module in (manifest_module, reading, read_ahead):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return WeightLog(tmp_path)


def drawn(seed: int) -> dict[str, bytes]:
    draw = random.Random(seed)
    return {name: draw.randbytes(torch.Size(shape).numel()) for name, shape in SHAPES.items()}


def begun(log: WeightLog, version: int, names: Iterable[str] = SHAPES) -> Upload:
    """Begin an upload of a version."""
    slots = [TensorSlot(name=name, dtype="int8", shape=SHAPES[name]) for name in names]
    return Upload(log, version, slots, log_memory(log.root))


class Reader:
    """A worker that has loaded a version and reads ahead in a thread; its area."""

    def __init__(self, log: WeightLog, placement: Placement, *, every: bool = True) -> None:
        first = begun(log, 1)
        first.store(drawn(1))
        self.placement, self._log, self._every = placement, log, every
        self.area = torch.zeros(placement.nbytes, dtype=torch.uint8)
        self._bounce_buffers = torch.zeros(3 * PASSAGE, dtype=torch.uint8).split(PASSAGE)
        self._mapped = MappedFiles()
        self._read: queue.Queue[set[str]] = queue.Queue()
        self.ahead = ReadAhead(first.commit(), placement, PASSAGE, every=every)
        self._thread = threading.Thread(target=self.ahead.run, args=(log.root, self._copying), daemon=True)
        self._thread.start()

    @contextmanager
    def _copying(self, folder: Path, manifest: Manifest, placement: Placement) -> Iterator[CopyPieces]:
        with VersionReader(folder, manifest, self._mapped, uploaded=True) as reader:

            def copies(found: Iterable[Piece]) -> Iterator[tuple[list[Piece], bytes]]:
                batches = list(copy_and_hash(reader, found, placement, self.area, self._bounce_buffers))
                yield from batches
                # the reader has noted them by now
                self._read.put({tensor.name for batch, _ in batches for piece in batch for tensor, _ in piece.chunks})

            yield copies

    def wait_for(self, names: set[str]) -> None:
        """Until pieces of all these tensors were read."""
        while names:
            names = names - self._read.get(timeout=WAIT_S)

    def ended(self) -> None:
        """Once it has ended by itself."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def stopped(self) -> None:
        self.ahead.stop()
        self.ended()

    def remaining_pieces(self, manifest: Manifest) -> set[str]:
        """Tensors of which something is read after the commit, and is: the area then has the version."""
        left = self.ahead.remaining_pieces(manifest)
        all_of_it = pieces(self.placement.chunks(manifest, every=self._every), PASSAGE)
        wanted = {(piece.file, piece.offset, piece.nbytes, piece.chunks) for piece in all_of_it}
        assert {(piece.file, piece.offset, piece.nbytes, piece.chunks) for piece in left} <= wanted
        with VersionReader(self._log.folder(manifest.version), manifest, self._mapped) as reader:
            for batch, digests in copy_and_hash(reader, left, self.placement, self.area, self._bounce_buffers):
                reader.require([entry for piece in batch for entry in piece.chunks], digests)
        return {tensor.name for piece in left for tensor, _ in piece.chunks}

    def holds(self, data: dict[str, bytes]) -> bool:
        return all(
            bytes(self.area[start : start + span.nbytes].tolist()) == data[span.tensor][span.start : span.end]
            for span, start in self.placement.places.items()
        )


WHOLE = Placement([Span(name, 0, torch.Size(shape).numel()) for name, shape in SHAPES.items()])


def test_what_is_stored_is_read_before_the_commit_and_not_again(log):
    reader, data = Reader(log, WHOLE), drawn(2)
    upload = begun(log, 2)
    upload.store({name: data[name] for name in ("first", "matrix")})
    reader.wait_for({"first", "matrix"})  # but for the piece that has the small one, too
    upload.store({name: data[name] for name in ("small", "last", "end")})
    reader.ended()
    assert reader.holds(data)
    manifest = upload.commit()
    assert reader.remaining_pieces(manifest) == set() and reader.holds(data)
    assert reader.ahead.read_bytes == sum(map(len, data.values()))


def test_a_rank_reads_the_pieces_of_its_own_rows(log):
    rows = Placement([Span("matrix", 0, 1500), Span("last", 41, 82)])
    reader, data = Reader(log, rows, every=False), drawn(2)
    upload = begun(log, 2)
    upload.store(data)
    reader.ended()
    manifest = upload.commit()
    assert reader.remaining_pieces(manifest) == set() and reader.holds(data)
    assert 0 < reader.ahead.read_bytes < sum(map(len, data.values()))


def test_what_was_not_read_when_it_is_committed_is_read_then(log):
    reader, data = Reader(log, WHOLE), drawn(2)
    upload = begun(log, 2)
    upload.store({"end": data["end"]})
    reader.wait_for({"end"})
    reader.stopped()
    upload.store({name: held for name, held in data.items() if name != "end"})
    manifest = upload.commit()
    left = reader.remaining_pieces(manifest)
    assert left == set(SHAPES) - {"end"} and reader.holds(data)
    assert reader.ahead.read_bytes == len(data["end"])
    unused = ReadAhead(manifest, WHOLE, PASSAGE, every=True)  # stopped before there was an upload
    assert sum(piece.nbytes for piece in unused.remaining_pieces(manifest)) == sum(map(len, data.values()))


@pytest.mark.parametrize("name", ["first", "end"])  # the first one is hashed by the host
def test_a_tensor_that_is_stored_again_is_read_again(log, name):
    reader, data = Reader(log, WHOLE), drawn(2)
    upload = begun(log, 2)
    upload.store(data)
    reader.ended()
    data[name] = drawn(3)[name]
    upload.store({name: data[name]})
    manifest = upload.commit()
    assert not reader.holds(data)
    left = reader.remaining_pieces(manifest)
    assert name in left and left != set(SHAPES) and reader.holds(data)


def half_read(log: WeightLog) -> tuple[Reader, dict[str, bytes], Upload]:
    """An upload of version 2 whose ``matrix`` and ``end`` were read, and what comes after it: ``end`` is the same."""
    reader, data = Reader(log, WHOLE), drawn(3)
    upload = begun(log, 2)
    upload.store({"matrix": drawn(2)["matrix"], "end": data["end"]})
    reader.wait_for({"matrix", "end"})
    return reader, data, upload


@pytest.mark.parametrize(("is_killed", "version"), [(False, 3), (True, 2)])
def test_after_an_upload_that_was_dropped_the_next_one_is_read(log, is_killed, version):
    reader, data, dropped = half_read(log)
    dropped.drop(is_killed=is_killed)
    upload = begun(log, version)
    upload.store({name: data[name] for name in ("matrix", "last")})
    reader.wait_for({"matrix", "last"})
    upload.store({name: data[name] for name in ("first", "small", "end")})
    reader.ended()
    assert reader.remaining_pieces(upload.commit()) == set() and reader.holds(data)


def test_a_reader_of_an_upload_whose_ingest_was_killed_ends_when_it_is_told_to(log):
    reader, data, killed = half_read(log)
    reader.stopped()
    killed.drop(is_killed=True)
    upload = begun(log, 3)
    upload.store(data)
    assert reader.remaining_pieces(upload.commit()) == set(SHAPES) - {"end"} and reader.holds(data)


def test_an_upload_of_other_tensors_is_not_read(log):
    reader, data = Reader(log, WHOLE), drawn(2)
    upload = begun(log, 2, names=reversed(SHAPES))
    upload.store(data)
    manifest = upload.commit()
    reader.stopped()
    assert reader.remaining_pieces(manifest) == set(SHAPES) and reader.holds(data)
    assert reader.ahead.read_bytes == 0
