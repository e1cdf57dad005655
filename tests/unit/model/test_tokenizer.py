"""Which folders have a tokenizer: whatever transformers loads, and no other."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollout_service.model.served_model import ServedModel, load_tokenizer

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "Ġ", *map(chr, range(33, 127))]
TEXT = "hello you"


@pytest.fixture
def bare(tiny_model: Path, tmp_path: Path) -> Path:
    """A model folder without a tokenizer."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    return tmp_path


def test_vocab_and_merges_are_a_tokenizer(bare):
    (bare / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (bare / "merges.txt").write_text("#version: 0.2\n")
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    (bare / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = ServedModel.load(bare).tokenizer
    assert tokenizer is not None and tokenizer.encode(TEXT) == AutoTokenizer.from_pretrained(bare).encode(TEXT)


def test_tokenizer_json_needs_no_configuration(bare, tiny_model):
    (bare / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(bare)
    assert tokenizer is not None and tokenizer.encode(TEXT) == AutoTokenizer.from_pretrained(bare).encode(TEXT)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.model", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken", "tiktoken.model", "spiece.model"],
)
def test_files_of_other_formats_are_found(bare, caplog, name):
    (bare / name).write_bytes(b"no vocabulary")
    with caplog.at_level(logging.INFO):
        load_tokenizer(bare)
    assert "holds no tokenizer" not in caplog.text


def test_what_cannot_be_loaded_is_named(bare, caplog):
    (bare / "tokenizer.model").write_bytes(b"no vocabulary")
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(bare) is None
    assert f"{bare}: transformers cannot load the tokenizer of tokenizer.model: " in caplog.text


def test_a_folder_without_vocabulary_has_no_tokenizer(bare, caplog):
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with caplog.at_level(logging.INFO):
        assert not ServedModel.load(bare).has_tokenizer
    assert "holds no tokenizer" in caplog.text


def test_a_damaged_tokenizer_json_is_an_error(bare):
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot load the tokenizer of tokenizer\.json.*again$"):
        load_tokenizer(bare)
