"""Tokenizers of the two kinds that language models have, small enough to be made by a test."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentence_piece, "metaspace": metaspace}
