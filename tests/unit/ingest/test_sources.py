"""Where unquantized tensors come from: folders that must be what they say, and parts cut anywhere."""

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from rollout_service.errors import Forbidden, InvalidManifest, InvalidRequest, NotFound
from rollout_service.ingest.sources.folder import FolderSource, allowed_path
from rollout_service.ingest.staged_parts import stream_buckets
from rollout_service.protocol.upload import SourceDtype, UploadTensor, placed
from rollout_service.store.staged_file import StagedFile
from tests.unit.ingest.faults import fail, of

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "allowed" / "step-1").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    return (tmp_path / "allowed").resolve()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


class TestAllowedPath:
    def test_a_path_is_allowed_if_it_stays_below_a_root(self, root):
        (root / "newest").symlink_to(root / "step-1")
        (root / "link").symlink_to(root.parent / "secret")
        for path in ("step-1", "newest"):
            assert allowed_path(root / path, (Path("/nowhere"), root)) == root / "step-1"
        assert allowed_path(root, (root,)) == root
        for path in ("link", "../secret", "step-1/../../secret", "..", "../allowed-not"):
            with pytest.raises(Forbidden, match=r"is not below weights\.source_roots"):
                allowed_path(root / path, (root,))
        with pytest.raises(Forbidden, match="none is configured"):
            allowed_path(root, ())

    def test_a_path_that_cannot_be_followed_is_refused(self, root):
        (root / "circle").symlink_to(root / "circle")
        for path, shown in (("x\0y", r"x\\x00y"), ("circle", "circle")):
            with pytest.raises(InvalidRequest, match=f"{shown}' cannot be followed"):
                allowed_path(root / path, (root,))


class WouldRun:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.trace),))


CODES = {"a": torch.zeros(2, 2).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(1, 1, dtype=torch.bfloat16)}


class TestFolder:
    def test_a_folder_lists_and_reads_the_tensors_of_all_its_files(self, folder):
        save_file({"a": WEIGHTS["a"]}, folder / "model-00001-of-00002.safetensors")
        save_file({"b": WEIGHTS["b"]}, folder / "model-00002-of-00002.safetensors")
        (folder / "config.json").write_text("{}")
        source = FolderSource(folder)
        assert list(source.batches(1)) == [["a"], ["b"]]
        assert list(source.batches(1 << 20)) == [["a", "b"]]
        assert source.table == (
            UploadTensor(name="a", dtype="float32", shape=(2, 3)),
            UploadTensor(name="b", dtype="bfloat16", shape=(4,)),
        )
        read = dict(source.read(["b", "a"]))
        assert list(read) == ["b", "a"]
        assert all(torch.equal(read[name], tensor) for name, tensor in WEIGHTS.items())

    def test_a_tensor_in_two_files_is_listed_twice(self, folder):
        for file in ("1.safetensors", "2.safetensors"):
            save_file(WEIGHTS, folder / file)
        assert [tensor.name for tensor in FolderSource(folder).table].count("a") == 2

    def test_files_that_the_index_does_not_name_are_not_read(self, folder):
        for number, name in enumerate(WEIGHTS):
            save_file({name: WEIGHTS[name]}, folder / f"model-{number}.safetensors")
        save_file({"renamed": WEIGHTS["a"].clone(), **WEIGHTS}, folder / "consolidated.safetensors")
        weight_map = {name: f"model-{number}.safetensors" for number, name in enumerate(WEIGHTS)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        before = FolderSource(folder)
        assert [tensor.name for tensor in before.table] == ["a", "b"]
        (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
        with pytest.raises(InvalidManifest, match=r"1 of the 2 files .* are missing: model-1\.safetensors"):
            FolderSource(folder)
        weight_map["b"] = "model-2.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert FolderSource(folder).stamp != before.stamp

    @pytest.mark.parametrize("path", ["missing", "file", "x" * 300, "file/below"])
    def test_what_is_no_folder_is_not_found(self, folder, path):
        (folder / "file").touch()
        with pytest.raises(NotFound, match="folder"):
            FolderSource(folder / path)

    def test_pickles_are_refused_by_name_and_never_opened(self, folder, tmp_path):
        with pytest.raises(InvalidManifest, match=r"must hold \*\.safetensors, but it holds none"):
            FolderSource(folder)
        content = pickle.dumps(WouldRun(tmp_path / "trace"))
        for name in ("pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "last.ckpt"):
            (folder / name).write_bytes(content)
            with pytest.raises(InvalidManifest, match=rf"holds pickles \({name}\).*safe_serialization=True"):
                FolderSource(folder)
            (folder / name).unlink()
        for written in (content, b"", b"x" * 100, (2**40).to_bytes(8, "little") + b"{}", save(WEIGHTS)[:-1]):
            (folder / "model.safetensors").write_bytes(written)
            with pytest.raises(InvalidManifest, match=r"model\.safetensors is not a safetensors file"):
                FolderSource(folder)
        assert not (tmp_path / "trace").exists()

    def test_a_file_that_cannot_be_read_is_not_called_damaged(self, folder, monkeypatch):
        (folder / "model.safetensors").write_bytes(save(WEIGHTS))
        fail(monkeypatch, Path, "open", errno.EACCES, of(folder / "model.safetensors"))
        with pytest.raises(InvalidManifest, match=r"model\.safetensors cannot be read: .*make it readable"):
            FolderSource(folder)

    @pytest.mark.parametrize(
        "make",
        [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("gone")],
        ids=["folder", "named pipe", "dangling link"],
    )
    def test_what_is_named_like_a_file_but_is_none_is_refused(self, folder, make):
        make(folder / "model.safetensors")
        with pytest.raises(InvalidManifest, match="is not a file, or a link to nowhere"):
            FolderSource(folder)

    def test_files_may_be_links_within_the_roots_only(self, root):
        save_file(WEIGHTS, root.parent / "secret" / "model.safetensors")
        (root / "step-1" / "model.safetensors").symlink_to(root.parent / "secret" / "model.safetensors")
        with pytest.raises(Forbidden, match=r"model\.safetensors is not below"):
            FolderSource(root / "step-1", (root,))
        (root / "step-1" / "model.safetensors").unlink()
        save_file(CODES, root / "blob")
        (root / "step-1" / "model.safetensors").symlink_to("../blob")
        source = FolderSource(root / "step-1", (root,))
        assert {name: tensor.dtype for name, tensor in source.read(["a", "a_scale_inv"])} == {
            "a": torch.float8_e4m3fn,
            "a_scale_inv": torch.float32,  # as they are stored
        }
        assert {tensor.name: tensor.dtype for tensor in source.table}["a_scale_inv"] == "float32"
        (root.parent / "secret" / "config.json").write_text("{}")
        (root / "step-1" / "config.json").symlink_to(root.parent / "secret" / "config.json")
        with pytest.raises(Forbidden, match=r"config\.json is not below"):
            FolderSource(root / "step-1", (root,))

    @pytest.mark.parametrize(("name", "shape"), [("", [1]), ("a", [1] * 65)], ids=["no name", "65 dimensions"])
    def test_a_tensor_that_no_model_has_is_refused(self, folder, name, shape):
        save_file({name: torch.zeros(shape)}, folder / "model.safetensors")
        with pytest.raises(InvalidManifest, match=rf"'{name}' in .*model\.safetensors is no tensor of a model"):
            FolderSource(folder)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2])
    def test_a_tensor_of_an_unsupported_dtype_is_refused_by_name(self, folder, dtype):
        save_file({"odd.weight": torch.zeros(2).to(dtype)}, folder / "model.safetensors")
        with pytest.raises(
            InvalidManifest, match=r"odd\.weight in model\.safetensors is \w+; the ingest takes BF16, F16, F32, F8_E4M3"
        ):
            FolderSource(folder)

    @pytest.mark.parametrize(
        "change",
        [
            lambda file: save_file({**WEIGHTS, "a": WEIGHTS["a"] + 1}, file),
            lambda file: save_file({"a": WEIGHTS["a"].T.contiguous()}, file),
            lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
            lambda file: os.truncate(file, file.stat().st_size - 1),
            lambda file: os.truncate(file, 0),
        ],
        ids=["replaced", "replaced by another table", "overwritten in place", "a byte cut off", "emptied"],
    )
    def test_a_file_that_changes_after_it_was_listed_is_refused(self, folder, change):
        file = folder / "model.safetensors"
        save_file(WEIGHTS, file)
        os.utime(file, ns=(1, 1))  # long ago: no clock is too coarse for what follows
        source = FolderSource(folder)
        change(file)
        with pytest.raises(InvalidManifest, match=r"b was to be read from .*model\.safetensors, which has changed"):
            list(source.read(["b"]))

    def test_a_file_truncated_while_it_is_read_fails_the_version(self, folder):
        file = folder / "model.safetensors"
        large = {name: torch.ones(1 << 18) for name in ("a", "b")}  # a map of these would reach beyond what is left
        save_file(large, file)
        tensors = FolderSource(folder).read(["a", "b"])
        _, first = next(tensors)
        assert str(file) not in Path("/proc/self/maps").read_text()
        os.truncate(file, 4096)
        assert torch.equal(first, large["a"])
        with pytest.raises(InvalidManifest, match="b was to be read from") as refused:
            next(tensors)
        assert refused.value.detail == {"tensor": "b", "file": str(file)}


SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
DTYPES: list[SourceDtype] = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
TABLES = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=6).map(
    lambda drawn: tuple(UploadTensor(name=f"t{i}", dtype=d, shape=s) for i, (d, s) in enumerate(drawn))
)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


class TestFolderOfCodes:
    def test_only_codes_need_a_sensible_config(self, folder):
        os.mkfifo(folder / "config.json")  # what is no file is not opened
        save_file(CODES, folder / "model.safetensors")
        assert len(FolderSource(folder).table) == 2
        (folder / "config.json").unlink()
        for text in ("{", "[]", '{"quantization_config": "fp8"}', "\xff"):
            (folder / "config.json").write_text(text, encoding="latin-1")
            with pytest.raises(InvalidManifest, match=r"config\.json does not say how its codes are to be read"):
                FolderSource(folder)
        save_file(WEIGHTS, folder / "model.safetensors")
        (folder / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
        assert len(FolderSource(folder).table) == 2


class TestStream:
    @settings(deadline=None, max_examples=80)
    @given(TABLES, st.integers(1, 64), st.integers(0, 2**32 - 1), st.booleans())
    def test_a_bucket_has_the_tensors_of_its_range(
        self, tmp_path_factory, table, part_bytes, seed,
        is_mapped
    ):  # fmt: skip
        path = tmp_path_factory.mktemp("parts") / "staged"
        stream = torch.randint(0, 256, (sum(t.nbytes for t in table),), generator=torch.Generator().manual_seed(seed))
        data = bytes(stream.tolist())
        path.write_bytes(data)
        file, read = StagedFile(path, len(data), is_mapped=is_mapped), []
        for bucket in stream_buckets(table, part_bytes):
            assert bucket.nbytes <= 4 * part_bytes or len(bucket.tensors) == 1
            ends = [number * part_bytes < bucket.offset + bucket.nbytes for number in bucket.parts]
            assert all(ends) and bool(bucket.parts) == bool(bucket.nbytes)
            if is_mapped and bucket.nbytes:
                on_gpu = bucket.copied(file, torch.device("cpu"), 64 * len(bucket.tensors) + 2 * bucket.nbytes)
                copied = [on_gpu[start : start + tensor.nbytes] for tensor, start in placed(bucket.tensors, 0)]
                assert b"".join(map(bytes_of, copied)) == data[bucket.offset : bucket.offset + bucket.nbytes]
            read += [(name, tuple(tensor.shape), bytes_of(tensor)) for name, tensor in bucket.read(file)]
        file.close()
        expected, offset = [], 0
        for tensor in table:
            expected.append((tensor.name, tensor.shape, data[offset : offset + tensor.nbytes]))
            offset += tensor.nbytes
        assert read == expected

    def test_a_file_that_was_truncated_raises_an_error(self, folder):
        file = StagedFile(folder / "staged", 16, is_mapped=False)
        os.truncate(folder / "staged", 15)
        [bucket] = stream_buckets((UploadTensor(name="t", dtype="float32", shape=(4,)),), part_bytes=8)
        with pytest.raises(OSError, match="staged is shorter than when it came"):
            list(bucket.read(file))
        file.close()
