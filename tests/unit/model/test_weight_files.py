"""Which files of a checkpoint count, where others hold the same weights, older ones, or none."""

import json

import pytest

from rollout_service.model.weight_files import listed_files, weight_files

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = [
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "model-00003-of-00003.safetensors",
    "x/a.safetensors",
]
INDEX = json.dumps({"weight_map": {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[0]}}).encode()


@pytest.mark.parametrize(
    ("there", "index", "chosen"),
    [
        ([*SHARDS, *OTHERS, "config.json"], INDEX, SHARDS),
        (["model.safetensors", "consolidated.safetensors"], INDEX, ["model.safetensors"]),  # of an older save
        ([*OTHERS, "model.safetensors"], None, ["model.safetensors"]),
        (["b.safetensors", "a.safetensors"], None, ["a.safetensors", "b.safetensors"]),
        (["consolidated.safetensors"], None, ["consolidated.safetensors"]),
        (["config.json"], None, []),
    ],
)
def test_the_files_of_the_index_count_or_else_the_usual_ones(there, index, chosen):
    assert weight_files(there, index) == chosen


def test_a_missing_shard_is_named():
    with pytest.raises(ValueError, match=r"1 of the 2 files .* are missing: model-00002-of-00002\.safetensors; copy"):
        weight_files([SHARDS[0], "model.safetensors"], INDEX)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (b"{", "is no index"),
        (b"[]", "is no index"),
        (b'{"weight_map": [1]}', "is no index"),
        (b'{"weight_map": {}}', "names no file"),
        (b'{"weight_map": {"a": "../secret.safetensors"}}', r"outside of its folder: \.\./secret"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(index, why):
    with pytest.raises(ValueError, match=why):
        listed_files(index)
