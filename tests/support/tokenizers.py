"""Tokenizers of the two kinds that language models have, small enough to be made by a test."""

import string
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

_TEXTS = [
    "User: say hi\n\nAssistant: well, hello there, this is a long answer",
    "</answer> <think> a  b\tEND stop STOP",
]
_WORDS = ["▁", "▁▁", "▁▁▁▁", "▁Paris", "▁return", "Paris", "▁é", "漢"]


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE, as of Qwen and Llama 3: rare characters are several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """Return a BPE as converted from SentencePiece, as of Llama 2: text that begins with a space loses it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [c for c in string.printable if c not in " \r\x0b\x0c"] + _WORDS
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    bpe = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """Return a BPE with a Metaspace decoder, as of newer conversions from SentencePiece."""
    tokenizer = sentence_piece()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


class _InPython(SentencePieceBackend):
    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012
    model_input_names = ["input_ids"]  # noqa: RUF012


def in_python(folder: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer without the tokenizers library, whose ``decode`` removes spaces before punctuation."""
    path = folder / "tokenizer.model"
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["Hello Paris , stop ."]), model_writer=file, vocab_size=99, hard_vocab_limit=False
        )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _InPython(vocab_file=str(path), clean_up_tokenization_spaces=True, **tokens)


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentence_piece, "metaspace": metaspace}
