"""TRL's trainer with a teacher on a server, and its worker of asynchronous distillation, in a process of their own.

python -m tests.clients.trl_distillation REPLIES URL MODEL FOLDER
"""

import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from trl.experimental.async_distillation.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from examples.trl_async_grpo import tokenizer_of
from tests.clients.lines import answer


class Distillation:
    """Both ask the service for the logprobs of the student's tokens."""

    def __init__(self, url: str, model: str, folder: Path) -> None:
        self._url, self._model, self._folder = url, model, folder

    def loss(self, prompts: list[str], top_k: int) -> float:
        """Train one step at a learning rate of 0, forward KL from the teacher. Return the loss."""
        settings = ServerDistillationConfig(
            output_dir=str(self._folder),
            teacher_model_server_url=self._url,
            beta=0.0,
            loss_top_k=top_k,
            max_completion_length=8,
            max_steps=1,
            per_device_train_batch_size=len(prompts),
            learning_rate=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = ServerDistillationTrainer(
            model=self._model,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer_of(self._model),
        )
        trainer.train()
        [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return float(loss)

    def scored(self, prompt: str, top_k: int) -> dict[str, Any]:
        """Let the worker sample one completion and have it scored. Return the arrays of its sample."""
        tokenizer = tokenizer_of(self._model)
        worker = AsyncRolloutWorker(
            model_name=self._model,
            dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}]]}),
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            vllm_server_url=self._url,
            teacher_server_urls={"default": self._url},
            teacher_top_k=top_k,
            max_inflight_tasks=1,
            max_tokens=6,
        )
        worker.start()
        try:
            sample = worker.rollout_buffer.get(timeout=300)
        finally:
            worker.stop()
        arrays = ("input_ids", "completion_mask", "teacher_topk_ids", "teacher_topk_logprobs")
        return {name: getattr(sample, name).tolist() for name in arrays}


def main(replies: str, url: str, model: str, folder: str) -> None:
    PartialState(cpu=True)
    answer(replies, {"distillation": Distillation(url, model, Path(folder))})


if __name__ == "__main__":
    main(*sys.argv[1:])
