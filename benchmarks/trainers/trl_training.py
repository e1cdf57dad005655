"""GRPO on ``addition`` by TRL's own trainer in server mode, in a process of its own: a line of JSON for each step.

Nothing of TRL is changed; the clock runs around two methods of its ``vllm_generation`` and between its callbacks.
"""

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from benchmarks.common.command import Options, run
from benchmarks.trainers.addition import MAX_TOKENS, problems, reward
from benchmarks.trainers.sides import COMPLETIONS, LEARNING_RATE, NUM_QUESTIONS, PROMPTS, with_rates
from rollout_service.correction import measure_mismatch

if TYPE_CHECKING:
    from trl import GRPOConfig

MICRO_BATCH = 64  # completions that the trainer computes at once
FROM_TRL = {"reward": "reward", "logprob_difference": "sampling/sampling_logp_difference/mean"}
"""Name here → name in TRL's logs. The difference is the mean of |trainer - engine| over tokens, in nats."""


class Training(Options):
    """Where the model is, where rollouts come from, and where steps are written."""

    folder: Path
    url: str
    server_limit_s: float
    out: Path
    steps: int
    group_port: int


def main(asked: Training) -> None:
    """Train, and write each step as it ends."""
    from datasets import Dataset
    from trl import GRPOTrainer

    chosen = list(itertools.islice(problems(2), NUM_QUESTIONS))
    prompts = [[{"role": "user", "content": problem.question}] for problem in chosen]
    started = time.perf_counter()
    trainer = GRPOTrainer(
        model=str(asked.folder),
        reward_funcs=is_right,
        args=arguments(asked),
        train_dataset=Dataset.from_dict({"prompt": prompts, "total": [problem.total for problem in chosen]}),
    )
    with asked.out.open("w") as out:
        steps = Steps(trainer, lambda line: print(json.dumps(line), file=out, flush=True))
        trainer.add_callback(steps)
        print(f"trainer ready after {time.perf_counter() - started:.1f} s", flush=True)
        trainer.train()
    trainer.vllm_generation.vllm_client.close_communicator()


def arguments(asked: Training) -> "GRPOConfig":
    """Return TRL's settings: its defaults, but for sizes, the learning rate and gradient checkpointing."""
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(asked.out.parent / "trainer"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=asked.url,
        vllm_server_timeout=asked.server_limit_s,
        vllm_group_port=asked.group_port,
        max_steps=asked.steps,
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * COMPLETIONS // MICRO_BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        seed=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )


def is_right(completions: list[list[dict[str, str]]], total: list[int], **_: Any) -> list[float]:
    """Return 1 for each completion that ends in the sum, else 0."""
    return [reward(completion[0]["content"], sum_) for completion, sum_ in zip(completions, total, strict=True)]


class Steps(TrainerCallback):
    """Measures each step of a trainer, and hands it to ``write`` with what TRL logs of it."""

    def __init__(self, trainer: Any, write: Callable[[dict[str, float]], None]) -> None:
        self._write = write
        self._seconds: dict[str, float] = defaultdict(float)
        self._began, self._tokens = 0.0, 0
        self._k3: list[tuple[float, float, int]] = []
        generation = trainer.vllm_generation
        generation.sync_weights = self._timed("sync_s", generation.sync_weights)
        generation.generate = self._timed("rollout_s", generation.generate, self._count)
        trainer.compute_loss = self._compared(trainer.compute_loss)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._seconds.clear()
        self._k3.clear()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, once the GPU has done the step's work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds["step_s"] = time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Write the step. TRL logs a step after its end, and the whole training once more at the end."""
        if logs is None or "reward" not in logs:
            return
        tokens = sum(count for _, _, count in self._k3)
        self._write(
            with_rates({"step": state.global_step, "tokens": self._tokens, **self._seconds})
            | {name: logs[key] for name, key in FROM_TRL.items() if key in logs}
            | {
                "k3": sum(k3 * count for k3, _, count in self._k3) / max(1, tokens),
                "probability_error": sum(error * count for _, error, count in self._k3) / max(1, tokens),
            }
        )

    def _timed(self, name: str, call: Callable[..., Any], look: Callable[[Any], None] | None = None) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self._seconds[name] += time.perf_counter() - began
            if look is not None:
                look(result)
            return result

        return timed

    def _count(self, generated: Any) -> None:
        self._tokens = sum(map(len, generated[1]))

    def _compared(self, compute_loss: Callable[..., Any]) -> Any:
        """TRL gives the loss both logprobs of each token: the engine's, and the trainer's of the same weights."""

        def compared(model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            trainer, engine = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
            mask = inputs["completion_mask"].bool()
            found = measure_mismatch(trainer, engine, mask)
            error = (trainer.exp() - engine.exp()).abs()[mask].mean().item()
            self._k3.append((found.k3, error, found.tokens))
            return compute_loss(model, inputs, *args, **kwargs)

        return compared


if __name__ == "__main__":
    run(main)
