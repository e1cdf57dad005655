"""A small Qwen3 with a character tokenizer, saved as a normal Hugging Face folder: what the CPU deployment serves.

The weights are random; the point is a model that every tool loads as it loads Qwen3-8B, and that a laptop can train.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ASCII = "\t\n" + "".join(chr(code) for code in range(0x20, 0x7F))
LETTERS_BEYOND_ASCII = "äöüßàâçèéêëîïñôùûáíóúåæøœ€°"
VOCABULARY = [PAD, BOS, EOS, UNK, *ASCII, *LETTERS_BEYOND_ASCII]
"""Token ``i`` is ``VOCABULARY[i]``; 128 in all, so that the embedding needs no padding and every id can be decoded."""

CHAT_TEMPLATE = (
    r"{% if tools %}{{ 'tools: ' + (tools | tojson) + '\n' }}{% endif %}"
    r"{% for message in messages %}{{ message.role + ': ' + (message.content or '') }}"
    r"{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    r"{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""One line a message; the model's own end as its replies do."""


def tiny_qwen3_config() -> Qwen3Config:
    """About 3 million parameters.

    Input and output of every projection, q, k and v each by itself, are multiples of 128 (the FP8 block), and
    ``head_dim`` is a multiple of 32 (what vLLM's FP8 KV cache on the CPU asks for).
    """
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, nothing added, so ``decode(encode(text)) == text`` for text of known characters.

    A character outside ``VOCABULARY`` becomes ``<unk>``; ``<eos>`` and the like, written out, become that one token.
    """
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=tiny_qwen3_config().max_position_embeddings,
    )


def make_tiny_qwen3(path: Path, *, seed: int = 0) -> None:
    """Save the model at ``path`` in BF16 with config, generation config and tokenizer; the same bytes per seed.

    The folder appears whole or not at all: it is written beside ``path`` and renamed. A model that is at ``path``
    already, from another process in a race perhaps, is left as it is, whatever its seed.

    Raises FileExistsError if something at ``path`` is not a model folder.
    """
    if (path / "config.json").is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _save(unfinished, seed)
        _move_into_place(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _save(folder: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_qwen3_config()).to(torch.bfloat16)
    # Sampling defaults would be applied by vLLM to every request that leaves them out: give it the token ids only.
    model.generation_config = GenerationConfig(
        pad_token_id=model.config.pad_token_id,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    folder.chmod(0o755)


def _move_into_place(unfinished: Path, path: Path) -> None:
    try:
        os.rename(unfinished, path)
    except OSError:
        if not (path / "config.json").is_file():
            raise FileExistsError(
                f"cannot make a model at {path}: something that is not a model folder (no config.json) is there; "
                "remove it or choose another path"
            ) from None
