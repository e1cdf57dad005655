"""The tasks of ``tis_ablation``: the demo's digits on a CPU, and additions written out, for a mixture on a GPU."""

import random
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json
from benchmarks.trainers import addition
from benchmarks.trainers.pretraining import CONTEXT, measure_right, size_of
from examples import digits_task, grpo
from examples.as_engine import InBf16
from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.quant.blockwise import CODES, E4M3_MAX, dequantize_blockwise, quantize_blockwise

GPU_DEPLOYMENT = PROJECT / "deployments/fp8_rollout.yaml"
LEARNING_RATE = 5e-5  # the highest of the addition task, after five steps of warm-up
KV_BYTES = 12_000_000_000  # the engine's KV cache in the addition task; the trainer needs about 35 GB of the GPU
HELD_OUT = 256  # questions for the accuracy at the end
HELD_OUT_SEED = 1_000_000


def held_out(task: grpo.Task, seed: int) -> list[str]:
    """Return the questions for the accuracy at the end."""
    return task.make_prompts(random.Random(HELD_OUT_SEED + seed), HELD_OUT)


@dataclass(frozen=True)
class Digits:
    """The demo's task; each seed has its own warm start, which is kept below ``folder``."""

    folder: Path
    deployment: Path
    task: grpo.Task = grpo.DIGITS
    sections: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"kv_cache": {"scales_policy": "unit"}}  # as in the published run
    )

    def settings(self) -> dict[str, Any]:
        """Return what a run depends on beside its arm."""
        return {"task": "digits"}

    def start(self, model_path: Path, seed: int) -> PreTrainedModel:
        """Make the warm start once, then read it."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        file = self.folder / f"seed{seed}.safetensors"
        if file.is_file():
            model.load_state_dict(load_file(file))
            return model
        digits_task.warm_start(model, AutoTokenizer.from_pretrained(model_path), seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp")
        save_file(model.state_dict(), unfinished)
        unfinished.rename(file)
        return model

    def policy(self, model: PreTrainedModel) -> AbstractContextManager[InBf16 | None]:
        return nullcontext()

    def trainer_accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> float:
        """Return the share of right digits in greedy answers."""
        questions = held_out(self.task, seed)
        return accuracy(self.task, questions, greedy_digits(model, tokenizer, questions))


def greedy_digits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str]:
    """Return the model's greedy answers, in FP32 and without an engine."""
    tokens = torch.tensor(tokenizer(questions)["input_ids"])
    with torch.no_grad():
        for _ in range(digits_task.DIGITS):
            logits = model(tokens, use_cache=False, logits_to_keep=1).logits
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [text.partition(tokenizer.eos_token)[0] for text in tokenizer.batch_decode(tokens[:, -digits_task.DIGITS :])]


def accuracy(task: grpo.Task, questions: list[str], answers: list[str]) -> float:
    """Return the mean reward, in [0, 1]."""
    return sum(task.reward(question, answer) for question, answer in zip(questions, answers, strict=True)) / len(
        questions
    )


@dataclass(frozen=True)
class Addition:
    """Sums of many numbers, by the model that ``--prepare`` has made at ``folder``; the trainer shares the GPU."""

    folder: Path
    prompts: int = 16  # of a step
    completions: int = 8  # of each prompt
    deployment: Path = GPU_DEPLOYMENT
    QUESTIONS: ClassVar[re.Pattern[str]] = re.compile(r"\b[a-z]=(\d+)")

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """Settings that are laid over the deployment's in every arm."""
        engine: Json = {"max_model_len": CONTEXT}
        if torch.cuda.is_available():
            # A size, since several trainers may share the GPU: vLLM would take what they allocate for the engine's.
            engine |= {"gpu_memory_utilization": 0.2, "extra": {"kv_cache_memory_bytes": KV_BYTES}}
        return {"model": {"path": str(self.folder), "create": None}, "engine": engine, "scaling": {"max_replicas": 1}}

    @property
    def task(self) -> grpo.Task:
        """Questions, reward and sizes."""
        size, tokenizer = size_of(self.folder), AutoTokenizer.from_pretrained(self.folder)

        def make_prompts(rng: random.Random, count: int) -> list[str]:
            chats = [[{"role": "user", "content": addition.draw(rng, size).question}] for _ in range(count)]
            return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]

        return grpo.Task(make_prompts, self.reward, self.prompts, self.completions, size.max_tokens, LEARNING_RATE)

    @classmethod
    def reward(cls, prompt: str, completion: str) -> float:
        """Return 1 if the completion ends in the sum of the prompt's numbers, else 0."""
        return addition.reward(completion, sum(map(int, cls.QUESTIONS.findall(prompt))))

    def settings(self) -> dict[str, Any]:
        """Return what a run depends on beside its arm."""
        size = size_of(self.folder)
        return {"task": "addition", "model": self.folder.name, "numbers": [size.fewest, size.most]}

    def start(self, model_path: Path, seed: int) -> PreTrainedModel:
        """Return the pre-trained model, for every seed the same."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        return model.to("cuda" if torch.cuda.is_available() else "cpu").train()

    def policy(self, model: PreTrainedModel) -> AbstractContextManager[InBf16 | None]:
        """Compute in BF16, and each layer's activations once more in the backward pass: a step is one batch."""
        policy = InBf16(model)
        policy.model.gradient_checkpointing_enable()
        return policy

    def trainer_accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> float:
        """Return the mean probability of the written-out right answer."""
        return measure_right(model, tokenizer, size_of(self.folder))


Setup = Digits | Addition  # a task with its model and the deployment that serves it


def coarse_weights(
    weights: Mapping[str, torch.Tensor], quantized: Collection[str], levels: int
) -> dict[str, torch.Tensor]:
    """Return a version to push: coarse codes and scales for the names in ``quantized``, all else as it is.

    Such weights stand for a mismatch that is much larger than FP8's own. The service checks that they are valid.
    """
    version: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name in quantized:
            version[name], version[name + SCALE_SUFFIX] = quantize_coarsely(weight, levels, name)
        else:
            version[name] = weight
    return version


def quantize_coarsely(weight: torch.Tensor, levels: int, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as one of ``levels`` integers, odd: codes e4m3 [N, K] and scales fp32 [⌈N/128⌉, ⌈K/128⌉]."""
    largest = levels // 2
    _, fine_scales = quantize_blockwise(weight, name)  # max|w| / 448
    scales = fine_scales * (E4M3_MAX / largest)
    scale_of_each = dequantize_blockwise(torch.ones(weight.shape).to(CODES), scales)
    integers = (weight.float() / scale_of_each).round().clamp(-largest, largest)
    return integers.to(CODES), scales
