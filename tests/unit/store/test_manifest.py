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

SAME_CONTENT: dict[str, dict[str, Any]] = {
    "another version": {"version": 4},
    "the tensors in another order": {"tensors": (B, A)},
    "another file layout": {"tensors": (replace(A, file="2.safetensors", offset=8), replace(B, offset=80))},
}
OTHER_CONTENT: dict[str, dict[str, Any]] = {
    "another model": {"fingerprint": "other"},
    "another recipe": {"recipe": Recipe(weights="none")},
    "another kind of scales": {"recipe": Recipe(weights="fp8_block", scales="power_of_two")},
    "another module in BF16": {"recipe": Recipe(weights="fp8_block", not_converted=("a",))},
    "a tensor less": {"tensors": (A,)},
    "other bytes": {"tensors": (A, replace(B, digest="bc"))},
    "another name": {"tensors": (A, replace(B, name="c"))},
    "another shape": {"tensors": (A, replace(B, shape=(2, 2)))},
    "another dtype": {"tensors": (replace(A, dtype="float8_e4m3fn"), B)},
    "scales of the KV cache": {"kv_scales": {"layer.0": 1.5}},
}


UNUSUAL_CONTENT: dict[str, dict[str, Any]] = {
    "names beyond ASCII": {
        "tensors": (B, replace(A, name='é "quoted" \\ 𝄞'), replace(A, name="ÿ"), replace(A, name="Z"))
    },
    "names that others begin with": {"tensors": tuple(replace(A, name=name) for name in ("a.b", "a", "a b", "aa", ""))},
    "a digest that is none": {"tensors": (replace(A, digest='"é'), B)},
    "no tensors": {"tensors": ()},
    "a scalar": {"tensors": (replace(A, shape=()),)},
    "channel scales": {"recipe": Recipe(weights="fp8_channel", block=None, not_converted=("é", "a"))},
    "scales of many sizes": {"kv_scales": {"é": 1e-30, "b": 1e16, "a": 1.0}, "fingerprint": "é"},
}


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
    @pytest.mark.parametrize("what", SAME_CONTENT)
    def test_the_digest_does_not_depend_on(self, what):
        assert MANIFEST.replace(**SAME_CONTENT[what]).digest == MANIFEST.digest

    def test_the_digest_depends_on_each_part_of_the_content(self):
        known = MANIFEST.digest  # computed once, and not for the copies
        digests = {what: MANIFEST.replace(**change).digest for what, change in OTHER_CONTENT.items()}
        assert len({known, *digests.values()}) == 1 + len(OTHER_CONTENT), digests

    @pytest.mark.parametrize("what", ["nothing else", *OTHER_CONTENT, *UNUSUAL_CONTENT])
    def test_the_digest_is_what_json_dumps_gives(self, what):
        manifest = MANIFEST.replace(**{**OTHER_CONTENT, **UNUSUAL_CONTENT}.get(what, {}))
        assert manifest.digest == plain_digest(manifest) == manifest_of_json(manifest.to_json()).digest

    @pytest.mark.parametrize("came_from", ["reuse", "trainer"])
    def test_the_digest_does_not_depend_on_where_scales_came_from(self, came_from):
        scaled = MANIFEST.replace(kv_scales={"layer.0": 1.5})
        assert scaled.replace(kv_scales_from=came_from).digest == scaled.digest


LARGE = bytes(2 * CHUNK_BYTES + 1)


def large(**fields: object) -> StoredTensor:
    digest, chunk_digests = tensor_digests(memoryview(LARGE))
    known = {"digest": digest, "chunk_digests": chunk_digests, **fields}
    return StoredTensor(
        name="a", dtype="float8_e4m3fn", shape=(len(LARGE),), file="1", offset=0, nbytes=len(LARGE), **known
    )


def as_written(**fields: object) -> bytes:
    """Return the manifest of one large tensor, with other white space than ours."""
    tensor = {
        "name": "a",
        "dtype": "float8_e4m3fn",
        "shape": [len(LARGE)],
        "file": "1",
        "offset": 0,
        "nbytes": len(LARGE),
        "digest": large().digest,
        "chunk_digests": base64.b64encode(large().chunk_digests).decode(),
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
    tensors=(large(),),
    kv_scales={"layer.0": 1.5},
    kv_scales_from="trainer",
    label="é",
)


class TestFile:
    @pytest.mark.parametrize("manifest", [MANIFEST, WRITTEN])
    def test_a_manifest_survives_its_file(self, tmp_path, manifest):
        (tmp_path / MANIFEST_FILE).write_bytes(manifest.to_json())
        assert read_manifest(tmp_path) == manifest

    def test_the_file_is_plain_json(self):
        assert manifest_of_json(as_written()) == WRITTEN
        assert json.loads(WRITTEN.to_json()) == json.loads(as_written())

    @pytest.mark.parametrize(
        ("known", "other", "why"),
        [
            ('"delta_of"', '"delta_from"', "delta_from"),  # of another release
            ('"delta_of":null', '"delta_of":2', "delta_of"),  # of a part of a version
            ('"version":3', '"version":-1', "version"),
            ('"fp8_block"', '"fp4_block"', "fp4_block"),
            ('"bfloat16"', '"float16"', r"tensors\[.*dtype"),
            ('"offset":80', '"offset":"80"', r"tensors\[.*offset"),
            ('"offset":80,', "", "offset"),
            ('"name":"b"', '"name":"a"', "tensor a occurs twice"),
            (',"rollback_of":null}', "", "truncated"),
        ],
    )
    def test_what_is_no_manifest_is_refused(self, tmp_path, known, other, why):
        text = MANIFEST.to_json().decode()
        assert known in text
        (tmp_path / MANIFEST_FILE).write_text(text.replace(known, other))
        with pytest.raises(ManifestDamaged, match=why):
            read_manifest(tmp_path)

    def test_text_that_is_not_utf_8_is_refused(self):
        with pytest.raises(ManifestDamaged):
            manifest_of_json(MANIFEST.to_json().replace(b'"model"', b'"\xff"'))

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"digest": "00" * 16}, "chunk_digests of a are not those of its 3 chunks"),
            ({"nbytes": len(LARGE) + CHUNK_BYTES}, "chunk_digests of a are not those of its 4 chunks"),
            ({"chunk_digests": ""}, "chunk_digests of a are not those of its 3 chunks"),
            ({"chunk_digests": "AAAA"}, "chunk_digests of a are not those of its 3 chunks"),
            ({"chunk_digests": "?"}, r"tensors\[.*chunk_digests"),
        ],
        ids=["another digest", "a chunk more", "none", "a chunk less", "no base64"],
    )
    def test_chunk_digests_that_do_not_match_the_digest_are_refused(self, fields, why):
        assert len(list(large().chunks())) == 3
        with pytest.raises(ManifestDamaged, match=why):
            manifest_of_json(as_written(**fields))

    def test_a_manifest_can_be_sent_between_processes(self):
        assert WRITTEN.digest
        received = pickle.loads(pickle.dumps(WRITTEN))
        assert received == WRITTEN and received.digest == WRITTEN.digest
