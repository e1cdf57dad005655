"""What readers see of an upload to a log in memory."""

from pathlib import Path

import pytest

from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.spare_files import SpareFiles
from rollout_service.store.tensor_places import TensorPlaces
from rollout_service.store.upload_progress import UploadToRead
from rollout_service.store.writer import LogMemory, VersionWriter

SLOTS = [TensorSlot(name=name, dtype="int8", shape=(4, 3)) for name in ("a", "b", "c")]


def writer_of(uploads: Path, version: int, *, in_memory: bool = True) -> VersionWriter:
    folder, spare = uploads / str(version), SpareFiles(uploads.parent)
    folder.mkdir(parents=True)
    spare.begin()
    return VersionWriter(folder, Layout(SLOTS, 24), LogMemory(MappedFiles(), spare) if in_memory else None)


def store(writer: VersionWriter, *names: str) -> None:
    for name in names:
        writer.slot(name)[:] = bytes(12)
        writer.filled(name)


def test_a_reader_sees_each_tensor_as_it_is_stored(tmp_path):
    writer = writer_of(tmp_path / "staging", 7)
    with UploadToRead.newest(tmp_path / "staging") or pytest.fail("no upload") as upload:
        assert upload.folder == tmp_path / "staging" / "7"
        assert upload.stored().tolist() == [False, False, False]
        store(writer, "c")
        assert upload.stored().tolist() == [False, False, True]
        store(writer, "a", "b")
        assert not upload.is_over
        tensors = writer.finish()
        assert upload.is_over and upload.stored().all()
        assert upload.places == TensorPlaces(tensors).digest
    assert sorted(path.suffix for path in upload.folder.iterdir()) == [".safetensors"] * 2


def test_an_upload_that_is_given_up_is_over(tmp_path):
    writer = writer_of(tmp_path / "staging", 7)
    with UploadToRead.newest(tmp_path / "staging") or pytest.fail("no upload") as upload:
        store(writer, "b")
        writer.close()
        assert upload.is_over and upload.stored().tolist() == [False, True, False]
    assert UploadToRead.newest(tmp_path / "staging") is None


def test_of_several_the_newest_that_is_being_written_is_found(tmp_path):
    uploads = tmp_path / "staging"
    assert UploadToRead.newest(uploads) is None
    writers = {version: writer_of(uploads, version) for version in (9, 10)}
    (uploads / "11.parts").mkdir()
    writer_of(uploads, 11, in_memory=False)
    for version in (10, 9):
        with UploadToRead.newest(uploads) or pytest.fail("no upload") as upload:
            assert upload.folder.name == str(version)
        writers[version].close()
    assert UploadToRead.newest(uploads) is None
