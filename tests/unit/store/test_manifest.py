"""The digest says whether two versions have the same content, and nothing else."""

import base64
import json
import pickle
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

from rollout_service.store.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    Manifest,
    ManifestDamaged,
    Recipe,
    StoredTensor,
    manifest_of_json,
    read_manifest,
    tensor_digests,
)

A = StoredTensor(name="a", dtype="bfloat16", shape=(2, 3), file="1.safetensors", offset=80, nbytes=12, digest="aa")
B = StoredTensor(name="b", dtype="float32", shape=(4,), file="1.safetensors", offset=92, nbytes=16, digest="bb")
MANIFEST = Manifest(version=3, fingerprint="model", recipe=Recipe(weights="fp8_block"), tensors=(A, B))

SAME_CONTENT: list[dict[str, Any]] = [
    {"version": 4},
    {"tensors": (B, A)},
    {"tensors": (replace(A, file="2.safetensors", offset=8), replace(B, offset=80))},
    {"kv_scales_from": "reuse"},
    {"kv_scales_from": "trainer"},
]
OTHER_CONTENT: list[dict[str, Any]] = [
    {"fingerprint": "other"},
    {"recipe": Recipe(weights="none")},
    {"recipe": Recipe(weights="fp8_block", scales="power_of_two")},
    {"recipe": Recipe(weights="fp8_block", not_converted=("a",))},
    {"tensors": (A,)},
    {"tensors": (A, replace(B, digest="bc"))},
    {"tensors": (A, replace(B, name="c"))},
    {"tensors": (A, replace(B, shape=(2, 2)))},
    {"tensors": (replace(A, dtype="float8_e4m3fn"), B)},
    {"kv_scales": {"layer.0": 1.5}},
]
UNUSUAL_CONTENT: list[dict[str, Any]] = [
    {"tensors": (B, replace(A, name='é "quoted" \\ 𝄞'), replace(A, name="ÿ"), replace(A, name="Z"))},
    {"tensors": tuple(replace(A, name=name) for name in ("a.b", "a", "a b", "aa", ""))},
    {"tensors": (replace(A, digest='"é'), B)},
    {"tensors": ()},
    {"tensors": (replace(A, shape=()),)},
    {"recipe": Recipe(weights="fp8_channel", block=None, not_converted=("é", "a"))},
    {"kv_scales": {"é": 1e-30, "b": 1e16, "a": 1.0}, "fingerprint": "é"},
]


def plain_digest(manifest: Manifest) -> str:
    recipe: dict[str, Any] = {
        "weights": manifest.recipe.weights,
        "block": manifest.recipe.block,
        "not_converted": manifest.recipe.not_converted,
    }
    if manifest.recipe.scales != "fp32":
        recipe["scales"] = manifest.recipe.scales
    content = {
        "fingerprint": manifest.fingerprint,
        "recipe": recipe,
        "kv_scales": manifest.kv_scales,
        "delta_of": None,
        "tensors": sorted((t.name, t.dtype, list(t.shape), t.digest) for t in manifest.tensors),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


class TestDigest:
    def test_the_digest_depends_on_each_part_of_the_content_and_on_nothing_else(self):
        known = MANIFEST.digest  # computed once, and not for the copies
        assert {MANIFEST.replace(**change).digest for change in SAME_CONTENT} == {known}
        digests = {MANIFEST.replace(**change).digest for change in OTHER_CONTENT}
        assert len({known, *digests}) == 1 + len(OTHER_CONTENT)

    @pytest.mark.parametrize("change", [{}, *OTHER_CONTENT, *UNUSUAL_CONTENT])
    def test_the_digest_is_what_json_dumps_gives(self, change):
        manifest = MANIFEST.replace(**change)
        assert manifest.digest == plain_digest(manifest) == manifest_of_json(manifest.to_json()).digest


LARGE = bytes(2 * CHUNK_BYTES + 1)


TENSOR = StoredTensor("a", "float8_e4m3fn", (len(LARGE),), "1", 0, len(LARGE), *tensor_digests(memoryview(LARGE)))


def as_written(**fields: object) -> bytes:
    """Return the manifest of one large tensor, with other white space than ours."""
    tensor = {
        "name": "a",
        "dtype": "float8_e4m3fn",
        "shape": [len(LARGE)],
        "file": "1",
        "offset": 0,
        "nbytes": len(LARGE),
        "digest": TENSOR.digest,
        "chunk_digests": base64.b64encode(TENSOR.chunk_digests).decode(),
    }
    content = {
        "version": 3,
        "fingerprint": "model",
        "recipe": {"weights": "fp8_block", "scales": "fp32", "block": [128, 128], "not_converted": ["lm_head"]},
        "tensors": [{**tensor, **fields}],
        "kv_scales": {"layer.0": 1.5},
        "kv_scales_from": "trainer",
        "delta_of": None,
        "label": "é",
        "rollback_of": None,
    }
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


WRITTEN = Manifest(
    version=3,
    fingerprint="model",
    recipe=Recipe(weights="fp8_block", not_converted=("lm_head",)),
    tensors=(TENSOR,),
    kv_scales={"layer.0": 1.5},
    kv_scales_from="trainer",
    label="é",
)


class TestFile:
    def test_the_file_is_plain_json(self):
        assert manifest_of_json(as_written()) == WRITTEN == manifest_of_json(WRITTEN.to_json())
        assert json.loads(WRITTEN.to_json()) == json.loads(as_written())

    @pytest.mark.parametrize(
        ("known", "other", "why"),
        [
            (b'"delta_of"', b'"delta_from"', "delta_from"),  # of another release
            (b'"delta_of":null', b'"delta_of":2', "delta_of"),  # of a part of a version
            (b'"version":3', b'"version":-1', "version"),
            (b'"fp8_block"', b'"fp4_block"', "fp4_block"),
            (b'"bfloat16"', b'"float16"', r"tensors\[.*dtype"),
            (b'"offset":80', b'"offset":"80"', r"tensors\[.*offset"),
            (b'"offset":80,', b"", "offset"),
            (b'"name":"b"', b'"name":"a"', "tensor a occurs twice"),
            (b',"rollback_of":null}', b"", "truncated"),
            (b'"model"', b'"\xff"', ""),
        ],
    )
    def test_what_is_no_manifest_is_refused(self, tmp_path, known, other, why):
        text = MANIFEST.to_json()
        assert known in text
        (tmp_path / MANIFEST_FILE).write_bytes(text.replace(known, other))
        with pytest.raises(ManifestDamaged, match=why):
            read_manifest(tmp_path)

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"digest": "00" * 16}, "of a are not those of its 3 chunks"),
            ({"nbytes": len(LARGE) + CHUNK_BYTES}, "of a are not those of its 4 chunks"),
            ({"chunk_digests": ""}, "of a are not those of its 3 chunks"),
            ({"chunk_digests": "AAAA"}, "of a are not those of its 3 chunks"),
            ({"chunk_digests": "?"}, r"tensors\[.*"),
        ],
    )
    def test_chunk_digests_that_do_not_match_the_digest_are_refused(self, fields, why):
        with pytest.raises(ManifestDamaged, match=why):
            manifest_of_json(as_written(**fields))

    def test_a_manifest_can_be_sent_between_processes(self):
        assert WRITTEN.digest
        received = pickle.loads(pickle.dumps(WRITTEN))
        assert received == WRITTEN and received.digest == WRITTEN.digest
