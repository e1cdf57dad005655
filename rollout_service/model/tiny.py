"""A small Qwen3 with a character tokenizer, saved as a normal Hugging Face folder, for the CPU deployment.

The weights are random. Every tool loads it like Qwen3-8B, and a laptop can train it.
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
"""One line per message; replies end with the end of sequence, as the model generates it."""


def tiny_qwen3_config() -> Qwen3Config:
    """Return a configuration with about 3 million parameters.

    Input and output sizes of every projection, including q, k and v separately, are multiples of 128 (the FP8 block).
    ``head_dim`` is a multiple of 32, which vLLM's FP8 KV cache on the CPU requires.
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
    """Return a tokenizer with one token per character, so ``decode(encode(text)) == text`` for known characters.

    It adds no tokens. A character outside ``VOCABULARY`` becomes ``<unk>``; a literal ``<eos>`` becomes that one token.
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

    The folder is written beside ``path`` and renamed, so it is never incomplete. An existing model at ``path`` is left
    unchanged, whatever its seed.

    Raises FileExistsError if something at ``path`` is not a model folder.
    """
    if (path / "config.json").is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _save(unfinished, seed)
        try:
            os.rename(unfinished, path)
        except OSError:
            if not (path / "config.json").is_file():
                raise FileExistsError(
                    f"cannot make a model at {path}: something that is not a model folder (no config.json) is there; "
                    "remove it or choose another path"
                ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _save(folder: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_qwen3_config()).to(torch.bfloat16)
    # only token ids: vLLM would apply other sampling defaults to every request that leaves them out
    model.generation_config = GenerationConfig(
        pad_token_id=model.config.pad_token_id,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    folder.chmod(0o755)
