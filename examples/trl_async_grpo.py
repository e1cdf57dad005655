"""TRL's asynchronous GRPO on the CPU, with rollouts from the service and weights over its upload client.

    make clients       then          PYTHONPATH=.clients/trl .venv/bin/python -m examples.trl_async_grpo --help

The task is the demo's (``digits_task``). TRL's own trainer and rollout worker do everything; what is ours is one
argument, ``weight_transfer=RolloutServiceWeightTransfer(url)``, which ``--lora`` does without: TRL then has the service
load adapters by vLLM's route. With a GPU and a service elsewhere leave out what is marked CPU; docs/trainers/trl.md has
these lines alone.
"""

import importlib.util
import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback

from examples.digits_task import ANSWER_TOKENS, make_prompts, reward, warm_start
from examples.trl_on_a_cpu import allow_training_on_a_cpu
from rollout_service.client.trl import RolloutServiceWeightTransfer
from rollout_service.local import running_service
from rollout_service.model.tiny import make_tiny_qwen3

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

MISSING = """\
TRL is not installed here. Install the version that this example was written for into a folder of its own, and name it:

    make clients
    PYTHONPATH=.clients/trl .venv/bin/python -m examples.trl_async_grpo
"""
COMPLETIONS_PER_PROMPT = 8
SAMPLES_PER_STEP = 128
LEARNING_RATE, LORA_LEARNING_RATE = 2e-4, 5e-3
ADAPTERS = {"max_live": 6, "max_rank": 8}
"""``engine.adapters``: TRL names max_staleness + 2 adapters, and an update needs a free place."""
NUM_PROMPTS = 4096


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps; each is followed by a weight version.", min=1)] = 30,
    url: Annotated[str | None, typer.Option(help="A service that runs already; by default one is started.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder to start from, under which name the service knows it; by default made.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model, before and after, and summary.json.")] = Path(
        "out/trl"
    ),
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter.")] = False,
) -> None:
    """Train a small model to write digits backwards with TRL's AsyncGRPOTrainer."""
    # the tests' packages hold TRL without what it needs, for its chat templates
    if any(importlib.util.find_spec(name) is None for name in ("trl", "accelerate")):
        typer.echo(MISSING, err=True)
        raise typer.Exit(2)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rollout_service.client").setLevel(logging.INFO)
    model = model or warm_started(out / "start")
    with service_for(model, url, out) as address:
        summary = train(str(model), address, steps, out, lora)
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    typer.echo(f"versions {summary['versions']}, reward {summary['rewards'][0]:.2f} to {summary['rewards'][-1]:.2f}")


def train(model: str, url: str, steps: int, out: Path, lora: bool) -> dict[str, Any]:
    """A whole training; returns the version after each sync and the rewards of each step."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    allow_training_on_a_cpu()  # CPU
    transfer = None if lora else RecordedTransfer(url)
    rewards = Rewards()
    prompts = make_prompts(random.Random(0), NUM_PROMPTS)
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=digits_reward,
        args=arguments(url, steps, out, LORA_LEARNING_RATE if lora else LEARNING_RATE),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]}),
        processing_class=tokenizer_of(model),
        callbacks=[rewards],
        weight_transfer=transfer,
        peft_config=lora_config() if lora else None,
    )
    trainer.train()
    if transfer is not None:
        trainer.save_model(str(out / "trained"))
        return {"versions": transfer.versions, "rewards": rewards.seen}
    trainer.model.merge_and_unload().save_pretrained(out / "trained")
    return {"versions": list(range(1, trainer.model_version + 1)), "rewards": rewards.seen}


def lora_config() -> "LoraConfig":
    """An adapter of every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def arguments(url: str, steps: int, out: Path, learning_rate: float) -> "AsyncGRPOConfig":
    """TRL's settings."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    return AsyncGRPOConfig(
        output_dir=str(out / "trainer"),
        vllm_server_base_url=url,
        max_steps=steps,
        num_generations=COMPLETIONS_PER_PROMPT,
        max_completion_length=ANSWER_TOKENS + 2,
        per_device_train_batch_size=SAMPLES_PER_STEP,
        token_budget=0,  # a fixed number of samples a step
        max_inflight_tasks=SAMPLES_PER_STEP,
        max_staleness=2,
        learning_rate=learning_rate,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,  # CPU
        bf16=False,  # CPU
        gradient_checkpointing=False,  # a small model
    )


class RecordedTransfer(RolloutServiceWeightTransfer):
    """Remembers the versions, for the summary."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.versions: list[int] = []

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().send_weights(iterator)
        assert self.status is not None
        self.versions.append(self.status.version)


class Rewards(TrainerCallback):
    """Remembers the mean reward of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is not None and "reward" in logs:
            self.seen.append(logs["reward"])


def digits_reward(
    prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], **_: Any
) -> list[float]:
    """Share of the digits that are right. TRL calls it in a process of its own, by its name."""
    return [
        reward(prompt[-1]["content"], completion[0]["content"])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """The character tokenizer, with the chat template and the response template that TRL asks for."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": ">",
        "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
    }
    return tokenizer


def warm_started(folder: Path) -> Path:
    """A model that does the task badly, made once: random weights sample nothing that is worth reinforcing."""
    if (folder / "config.json").is_file():
        return folder
    unlearnt = folder.with_name("unlearnt")
    make_tiny_qwen3(unlearnt)
    model = AutoModelForCausalLM.from_pretrained(unlearnt, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(unlearnt)
    warm_start(model, tokenizer, seed=0)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # config.json with the weights: last
    return folder


@contextmanager
def service_for(model: Path, url: str | None, out: Path) -> Iterator[str]:
    """The address of a service that serves ``model`` under the name that TRL asks for: the folder as it was given."""
    if url is not None:
        yield url
        return
    overrides: dict[str, dict[str, object]] = {
        "model": {"path": model, "create": None, "aliases": [str(model)]},
        "weights": {"root": out / "weights", "source_roots": [out.absolute()]},
        "engine": {"adapters": ADAPTERS},
    }
    with running_service(Path("deployments/cpu_rollout.yaml"), overrides) as service:
        yield service.url


if __name__ == "__main__":
    typer.run(main)
