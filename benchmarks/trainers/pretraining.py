"""A small Qwen3, dense or a mixture of experts, that does ``addition`` now and then: made on the spot from nothing.

Training ends as soon as the model gives a right answer with the probability that was asked for, or when its time is
over. That probability is exact: the mean, over held-out questions, of the probability of the one right answer.
"""

import importlib.util
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.common.paths import PROJECT
from benchmarks.trainers.addition import SHORT, Problem, Size, problems
from examples.as_engine import InBf16

VOCABULARY = 2048
CONTEXT = 1024
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True)) | inner
    for name, sizes, inner in (
        # 0.43 billion parameters, a quarter of them active; the next one is for a CPU
        ("moe", (1024, 8, 8, 4, 128), {"moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4}),
        ("tiny-moe", (256, 2, 4, 2, 64), {"moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4}),
        ("0.2b", (1024, 12, 8, 4, 128), {"intermediate_size": 4096}),
    )
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THOUGHTS = ("<think>", "</think>")
_WORDS = (  # as Qwen's tokenizer cuts text; each digit is a token
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QUESTION = "QUESTION"
_BATCH, _HELD_OUT, _EVERY = 64, 256, 10
_LEARNING_RATE, _WARM_UP = 6e-4, 40
_HELD_OUT_SEED, _SEED = 1_000_000, 1_000_001
_BALANCE = 0.01  # weight of the loss that keeps a router from sending all tokens to a few experts


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on this project's pages and on the task; give it Qwen3's special tokens and chat template.

    Raises ModuleNotFoundError without TRL, which ships the template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_THOUGHTS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [page.read_text() for page in sorted((PROJECT / "docs").rglob("*.md"))]
    task = [f"{problem.question}\n{problem.answer}" for problem in itertools.islice(problems(0), 200)]
    tokenizer.train_from_iterator([*pages, *task], trainer)
    tokenizer.add_tokens(list(_THOUGHTS))  # kept when special tokens are skipped, as Qwen3's are
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        clean_up_tokenization_spaces=False,
        chat_template=_qwen3_template(),
        model_max_length=CONTEXT,
    )


def _qwen3_template() -> str:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("TRL, which ships Qwen3's chat template, is not installed: scripts/clients.sh trl")
    return (Path(found.submodule_search_locations[0]) / "chat_templates/qwen3.jinja").read_text()


def make_model(shape: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model with random weights in FP32. Raises KeyError for a shape that is not in ``SHAPES``."""
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    model: PreTrainedModel
    if "num_experts" in SHAPES[shape]:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **sizes, **SHAPES[shape], **ids))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **SHAPES[shape], **ids))
    model.generation_config = GenerationConfig(**ids)
    return model


@dataclass(frozen=True)
class Batch:
    """Questions with their answers, int64 [problems, tokens] each; in ``labels`` all but the answer is -100."""

    tokens: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, some: list[Problem]) -> "Batch":
        """Tokenize questions as a trainer renders them, and answers with their end; pad on the right."""
        user = [{"role": "user", "content": _QUESTION}]
        asked = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False)
        prompts = tokenizer([asked.replace(_QUESTION, problem.question) for problem in some])["input_ids"]
        answers = tokenizer([f"{problem.answer}{tokenizer.eos_token}" for problem in some])["input_ids"]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        tokens = torch.full((len(some), width), tokenizer.pad_token_id)
        labels = torch.full_like(tokens, -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return cls(tokens, labels)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    target: float,
    limit_s: float,
    device: torch.device,
    size: Size = SHORT,
) -> dict[str, Any]:
    """Train ``model`` until a right answer has the probability ``target``, ``limit_s`` seconds at most."""
    model.to(device).train()
    policy = InBf16(model)
    is_mixture = hasattr(model.config, "num_experts")
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    held_out = _held_out(tokenizer, size).to(device)
    started, right = time.monotonic(), 0.0
    for step, batch in enumerate(_batches(tokenizer, size), 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, step / _WARM_UP)
        logprobs, balance = _logprobs(policy, batch.to(device), output_router_logits=is_mixture)
        loss = -logprobs.sum() / (batch.labels != -100).sum()
        (loss if balance is None else loss + _BALANCE * balance).backward()
        policy.hand_gradients_over()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        took_s = time.monotonic() - started
        if step % _EVERY and took_s < limit_s:
            continue
        before, right = right, _probability(policy, held_out)
        ends = right >= target or took_s >= limit_s
        if step % (10 * _EVERY) == 0 or ends:
            print(f"pre-training step {step}, {took_s:.1f} s: loss {loss.item():.4f}, right {right:.4f}", flush=True)
        if ends:
            break
        kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if abs(before - target) < abs(right - target):
        model.load_state_dict(kept)
        right = before
    return {"steps": step, "seconds": took_s, "right": right}


def _batches(tokenizer: PreTrainedTokenizerFast, size: Size) -> Iterator[Batch]:
    source = problems(_SEED, size)
    while True:
        yield Batch.of(tokenizer, list(itertools.islice(source, _BATCH)))


def _held_out(tokenizer: PreTrainedTokenizerFast, size: Size) -> Batch:
    return Batch.of(tokenizer, list(itertools.islice(problems(_HELD_OUT_SEED, size), _HELD_OUT)))


def _logprobs(policy: InBf16, batch: Batch, **options: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logprob of each label, float32 [problems, tokens - 1], 0 where there is none; and the router's loss of
    balance if ``output_router_logits`` asks for it."""
    outputs = policy.outputs(batch.tokens[:, :-1], **options)
    labels = batch.labels[:, 1:]
    losses = cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view_as(labels), getattr(outputs, "aux_loss", None)


@torch.no_grad()
def _probability(policy: InBf16, batch: Batch) -> float:
    rows = zip(batch.tokens.split(_BATCH), batch.labels.split(_BATCH), strict=True)
    sums = torch.cat([_logprobs(policy, Batch(tokens, labels))[0].sum(1) for tokens, labels in rows])
    return sums.exp().mean().item()


def measure_right(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, size: Size) -> float:
    """Return the mean probability of the written-out right answer, over held-out questions."""
    return _probability(InBf16(model), _held_out(tokenizer, size).to(model.device))


def size_of(folder: Path) -> Size:
    """Return the size of the problems that the model at ``folder`` was trained for."""
    return Size(*json.loads((folder / "pretraining.json").read_text())["numbers"])


def prepare(folder: Path, shape: str, *, target: float, limit_s: float, size: Size = SHORT) -> None:
    """Make the model at ``folder``, in BF16, unless it is there."""
    if (folder / "config.json").is_file():
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = make_tokenizer()
    model = make_model(shape, tokenizer)
    reached = {"shape": shape, "numbers": [size.fewest, size.most]}
    reached |= pretrain(model, tokenizer, target=target, limit_s=limit_s, device=device, size=size)
    tokenizer.save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps(reached))
    model.to(torch.bfloat16).save_pretrained(folder)  # config.json with the weights: last
    print(f"{folder}: {sum(weights.numel() for weights in model.parameters()) / 1e6:.0f} M parameters {reached}")
