"""verl's GRPO with separate trainer and engine, unmodified: through this service, and with verl's own vLLM server.

    python -m benchmarks.trainers.verl --prepare --folder F        makes the model: two minutes on a GPU; needs TRL
    python -m benchmarks.trainers.verl --side ours --folder F      then --side own
    python -m benchmarks.trainers.verl --report                    docs/trainers/verl.png and the table of its page

Two GPUs, the first two of CUDA_VISIBLE_DEVICES: the trainer has one, the engine the other. Each side is a case of
benchmarks/results/<machine>/trainers_verl.json. The environment has requirements/clients/verl.txt beside this service
and, for verl's own side, cupy-cuda13x.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command import run
from benchmarks.common.paths import PROJECT
from benchmarks.trainers.addition import MAX_TOKENS, problems
from benchmarks.trainers.sides import (
    COMPLETIONS,
    LEARNING_RATE,
    NUM_QUESTIONS,
    PROMPTS,
    Line,
    Run,
    SideOptions,
    perform,
    service_command,
    steps_of,
    with_rates,
)

MICRO_BATCH_TOKENS = 32768  # tokens that the trainer computes at once
PARTS = PROJECT / "benchmarks/trainers/verl_parts.py"
FROM_VERL = {  # name here → name in verl's logs
    "step_s": "timing_s/step",
    "sync_s": "timing_s/update_weights",
    "rollout_s": "timing_s/gen",
    "reward": "critic/score/mean",
    "mean_tokens": "response_length/mean",
    "k3": "rollout_corr/k3_kl",
    "probability_error": "training/rollout_probs_diff_mean",
}
_WITHOUT_TRL = "benchmarks.trainers.without_trl"
EXTERNAL_MODULES = {"ours": [_WITHOUT_TRL], "own": [_WITHOUT_TRL, "benchmarks.trainers.vllm_for_verl"]}


def main(asked: SideOptions) -> None:
    """Make the model, run one side, or report."""
    perform(asked, "verl", processes)


def processes(asked: SideOptions, folder: Path) -> Run:
    """Return the processes of a side, and write the questions beside the model."""
    questions = asked.folder.absolute() / "questions.parquet"
    write_questions(questions)
    return Run(
        server=service_command(asked) if asked.side == "ours" else None,
        command=[
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *trainer_options(asked, questions),
            *engine_options(asked),
        ],
        environment={
            "VERL_FILE_LOGGER_PATH": str(steps_of(folder)),
            # at INFO verl 0.9.1 fails with hybrid_engine=False: it logs with an argument that logging does not take
            "VERL_LOGGING_LEVEL": "WARNING",
            # they adapt what is newer here than verl 0.9.1 knows
            "VERL_USE_EXTERNAL_MODULES": ",".join(EXTERNAL_MODULES[asked.side or "own"]),
        },
        line=step_of,
    )


def write_questions(file: Path) -> None:
    """Write the questions as verl reads them, unless they are there."""
    if file.exists():
        return
    from datasets import Dataset

    rows = [
        {
            "data_source": "addition",
            "prompt": [{"role": "user", "content": problem.question}],
            "reward_model": {"style": "rule", "ground_truth": str(problem.total)},
        }
        for problem in itertools.islice(problems(2), NUM_QUESTIONS)
    ]
    Dataset.from_list(rows).to_parquet(file)


def trainer_options(asked: SideOptions, questions: Path) -> list[str]:
    """Return verl's options that are the same for every side: its defaults, but for sizes and what is not installed."""
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    return [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=0",  # each step trains on rollouts of its own weights
        f"trainer.v1.sampler.custom_sampler.path={PARTS}",
        "trainer.v1.sampler.custom_sampler.name=PromptReplayBuffer",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={asked.steps}",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        f"data.train_files={questions}",
        f"data.val_files={questions}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=256",
        f"data.max_response_length={MAX_TOKENS}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={PARTS}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.hybrid_engine=False",
        f"{model}.path={asked.folder.absolute()}",
        f"+{model}.override_config.attn_implementation=sdpa",  # verl's default, FlashAttention 2, is not installed
        f"{model}.use_remove_padding=False",  # needs FlashAttention 2, too
        f"{model}.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={MICRO_BATCH_TOKENS}",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"actor_rollout_ref.rollout.n={COMPLETIONS}",
        "+ray_kwargs.ray_init.address=local",  # not the service's Ray, which runs on the same host
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def engine_options(asked: SideOptions) -> list[str]:
    """Return what each side's documentation has users write."""
    rollout = "actor_rollout_ref.rollout"
    one = [f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.tensor_model_parallel_size=1"]
    if asked.side == "ours":
        return [
            *one,
            f"{rollout}.name=rollout_service",
            f"{rollout}.checkpoint_engine.backend=rollout_service",
            f"+{rollout}.checkpoint_engine.engine_kwargs.rollout_service.url={asked.url}",
        ]
    return [*one, f"{rollout}.name=vllm", f"{rollout}.checkpoint_engine.backend=nccl"]


def step_of(written: dict[str, Any]) -> Line:
    """Return a step of verl's log. Raises KeyError if verl did not log one of its numbers."""
    line = {name: float(written["data"][key]) for name, key in FROM_VERL.items()}
    tokens = round(line["mean_tokens"] * PROMPTS * COMPLETIONS)
    return with_rates({"step": float(written["step"]), **line, "tokens": tokens})


if __name__ == "__main__":
    run(main)
