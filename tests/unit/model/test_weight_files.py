"""Which files of a checkpoint count, where others hold the same weights, older ones, or none."""

import json

import pytest

from rollout_service.model.weight_files import listed_files, weight_files

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[0]}}).encode()


def test_the_files_of_the_index_count_and_no_others():
    others = ["consolidated.safetensors", "model.safetensors", "model-00003-of-00003.safetensors", "x/a.safetensors"]
    assert weight_files([*others, *SHARDS, "config.json"], INDEX) == SHARDS


def test_a_missing_shard_is_named():
    with pytest.raises(ValueError, match=r"1 of the 2 files .* are missing: model-00002-of-00002\.safetensors; copy"):
        weight_files([SHARDS[0], "model.safetensors"], INDEX)


def test_the_index_of_an_older_save_is_passed_over():
    assert weight_files(["model.safetensors", "consolidated.safetensors"], INDEX) == ["model.safetensors"]


def test_without_an_index_other_formats_do_not_count():
    assert weight_files(["consolidated.safetensors", "model.safetensors"], None) == ["model.safetensors"]
    others = ["adapter_model.safetensors", "model.fp16.safetensors"]
    assert weight_files([*others, "model.safetensors"], None) == ["model.safetensors"]
    assert weight_files(["b.safetensors", "a.safetensors"], None) == ["a.safetensors", "b.safetensors"]
    assert weight_files(["consolidated.safetensors"], None) == ["consolidated.safetensors"]
    assert weight_files(["config.json"], None) == []


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
