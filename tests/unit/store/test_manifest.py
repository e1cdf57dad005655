"""The digest says whether two versions have the same content, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import xxhash
from pydantic import ValidationError

from rollout_service.store.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    Manifest,
    Recipe,
    StoredTensor,
    read_manifest,
    tensor_digests,
)

A = StoredTensor(name="a", dtype="bfloat16", shape=(2, 3), file="1.safetensors", offset=80, nbytes=12, digest="aa")
B = StoredTensor(name="b", dtype="float32", shape=(4,), file="1.safetensors", offset=92, nbytes=16, digest="bb")
MANIFEST = Manifest(version=3, fingerprint="model", recipe=Recipe(weights="fp8_block"), tensors=(A, B))

SAME_CONTENT: dict[str, dict[str, Any]] = {
    "another version": {"version": 4},
    "the tensors in another order": {"tensors": (B, A)},
    "another file layout": {
        "tensors": (A.model_copy(update={"file": "2.safetensors", "offset": 8}), B.model_copy(update={"offset": 80}))
    },
}
OTHER_CONTENT: dict[str, dict[str, Any]] = {
    "another model": {"fingerprint": "other"},
    "another recipe": {"recipe": Recipe(weights="none")},
    "another kind of scales": {"recipe": Recipe(weights="fp8_block", scales="power_of_two")},
    "another module in BF16": {"recipe": Recipe(weights="fp8_block", not_converted=("a",))},
    "a tensor less": {"tensors": (A,)},
    "other bytes": {"tensors": (A, B.model_copy(update={"digest": "bc"}))},
    "another name": {"tensors": (A, B.model_copy(update={"name": "c"}))},
    "another shape": {"tensors": (A, B.model_copy(update={"shape": (2, 2)}))},
    "another dtype": {"tensors": (A.model_copy(update={"dtype": "float8_e4m3fn"}), B)},
    "scales of the KV cache": {"kv_scales": {"layer.0": 1.5}},
    "scales that are not measured yet": {"kv_scales_from": "calibrate"},
}


class TestDigest:
    @pytest.mark.parametrize("what", SAME_CONTENT)
    def test_the_digest_does_not_depend_on(self, what: str) -> None:
        assert MANIFEST.model_copy(update=SAME_CONTENT[what]).digest == MANIFEST.digest

    def test_the_digest_depends_on_each_part_of_the_content(self) -> None:
        known = MANIFEST.digest  # computed once, and not for the copies
        digests = {what: MANIFEST.model_copy(update=change).digest for what, change in OTHER_CONTENT.items()}
        assert len({known, *digests.values()}) == 1 + len(OTHER_CONTENT), digests

    def test_the_digest_is_xxh3_of_the_content_as_sorted_json(self) -> None:
        content = (
            '{"delta_of": null, "fingerprint": "model", "kv_scales": null, '
            '"recipe": {"block": [128, 128], "not_converted": [], "weights": "fp8_block"}, '
            '"tensors": [["a", "bfloat16", [2, 3], "aa"], ["b", "float32", [4], "bb"]]}'
        )
        assert MANIFEST.digest == xxhash.xxh3_128_hexdigest(content.encode())

    def test_a_version_awaits_its_scales_until_they_are_in_it(self) -> None:
        awaiting = MANIFEST.model_copy(update={"kv_scales_from": "calibrate"})
        assert awaiting.awaits_kv_scales and not MANIFEST.awaits_kv_scales
        assert not awaiting.model_copy(update={"kv_scales": {"layer.0": 1.5}}).awaits_kv_scales

    @pytest.mark.parametrize("came_from", ["calibrate", "reuse", "trainer"])
    def test_the_digest_does_not_depend_on_where_scales_came_from(self, came_from: str) -> None:
        scaled = MANIFEST.model_copy(update={"kv_scales": {"layer.0": 1.5}})
        assert scaled.model_copy(update={"kv_scales_from": came_from}).digest == scaled.digest


class TestTensors:
    def test_total_bytes_are_those_of_all_tensors(self) -> None:
        assert MANIFEST.total_bytes == 28

    def test_files_list_their_tensors_in_the_order_of_offsets(self) -> None:
        c = A.model_copy(update={"name": "c", "file": "0.safetensors"})
        files = MANIFEST.model_copy(update={"tensors": (B, c, A)}).files()
        assert {file: [t.name for t in tensors] for file, tensors in files.items()} == {
            "0.safetensors": ["c"],
            "1.safetensors": ["a", "b"],
        }

    def test_a_large_tensor_of_an_old_manifest_is_one_chunk(self) -> None:
        known = large().model_dump(exclude={"chunk_digests"}) | {"digest": xxhash.xxh3_128_hexdigest(LARGE)}
        [chunk] = StoredTensor.model_validate(known).chunks()
        assert (chunk.start, chunk.nbytes, chunk.digest) == (0, len(LARGE), xxhash.xxh3_128_digest(LARGE))


LARGE = bytes(2 * CHUNK_BYTES + 1)


def large(**fields: object) -> StoredTensor:
    digest, chunk_digests = tensor_digests(memoryview(LARGE))
    known = {"digest": digest, "chunk_digests": chunk_digests, **fields}
    return StoredTensor(
        name="a", dtype="float8_e4m3fn", shape=(len(LARGE),), file="1", offset=0, nbytes=len(LARGE), **known
    )


class TestFile:
    def test_a_manifest_survives_its_file(self, tmp_path: Path) -> None:
        (tmp_path / MANIFEST_FILE).write_text(MANIFEST.model_dump_json(indent=1))
        assert read_manifest(tmp_path) == MANIFEST

    def test_a_manifest_with_a_field_of_another_release_is_refused(self, tmp_path: Path) -> None:
        text = MANIFEST.model_dump_json().replace('"delta_of"', '"delta_from"')
        (tmp_path / MANIFEST_FILE).write_text(text)
        with pytest.raises(ValidationError, match="delta_from"):
            read_manifest(tmp_path)

    def test_a_manifest_of_a_part_of_a_version_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / MANIFEST_FILE).write_text(MANIFEST.model_dump_json().replace('"delta_of":null', '"delta_of":2'))
        with pytest.raises(ValidationError, match="delta_of"):
            read_manifest(tmp_path)

    @pytest.mark.parametrize(
        "fields",
        [{"digest": "00" * 16}, {"chunk_digests": large().chunk_digests[:-8]}, {"chunk_digests": "?"}],
        ids=["another digest", "a chunk less", "no base64"],
    )
    def test_chunk_digests_that_do_not_match_the_digest_are_refused(self, fields: dict[str, str]) -> None:
        assert len(list(large().chunks())) == 3
        with pytest.raises(ValidationError, match="chunk_digests of a are not"):
            large(**fields)
