"""What readers see of an upload to a log in memory."""

from pathlib import Path

import pytest

from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout, TensorPlaces
from rollout_service.store.mapped_files import MappedFiles, SpareFiles
from rollout_service.store.upload_progress import UploadToRead
from rollout_service.store.writer import LogMemory, VersionWriter

SLOTS = [TensorSlot(name=name, dtype="int8", shape=(4, 3)) for name in ("a", "b", "c")]


def writer_of(uploads: Path, version: int, *, in_memory: bool = True) -> VersionWriter:
    folder, spare = uploads / str(version), SpareFiles(uploads.parent)
    folder.mkdir(parents=True)
    spare.begin()
    return VersionWriter(folder, Layout(SLOTS, 24), LogMemory(MappedFiles(), spare) if in_memory else None)


def test_an_upload_whose_tensors_are_all_stored_is_over_once_it_is_finished(tmp_path):
    writer = writer_of(tmp_path / "staging", 7)
    with UploadToRead.newest(tmp_path / "staging") or pytest.fail("no upload") as upload:
        for name in "abc":
            writer.slot(name)[:] = bytes(12)
            writer.filled(name)
        assert not upload.is_over
        tensors = writer.finish()
        assert upload.is_over and upload.stored().all()
        assert upload.places == TensorPlaces(tensors).digest


def test_of_several_uploads_the_newest_that_is_being_written_is_found(tmp_path):
    uploads = tmp_path / "staging"
    assert UploadToRead.newest(uploads) is None
    writers = {version: writer_of(uploads, version) for version in (9, 10)}
    (uploads / "11.parts").mkdir()
    writer_of(uploads, 11, in_memory=False)
    for version in (10, 9):
        writer = writers[version]
        with UploadToRead.newest(uploads) or pytest.fail("no upload") as upload:
            assert upload.folder.name == str(version) and upload.stored().tolist() == [False] * 3
            writer.slot("c")[:] = bytes(12)
            writer.filled("c")
            assert upload.stored().tolist() == [False, False, True] and not upload.is_over
            writer.close()  # given up
            assert upload.is_over and upload.stored().tolist() == [False, False, True]
        assert sorted(path.suffix for path in upload.folder.iterdir()) == [".safetensors"] * 2
    assert UploadToRead.newest(uploads) is None
