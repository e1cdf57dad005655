"""GRPO on the CPU, with rollouts from the service: a tutorial in one file.

    make demo          or          python -m examples.grpo_digits --help

The loop every RL trainer has, in plain PyTorch:

    1. ask the service for n completions of each prompt           client.generate_batch
    2. score them, and compare each with the others of its prompt  advantages
    3. step the policy, correcting for FP8                         policy_loss
    4. tell the service how far its engines were from the trainer  client.report_mismatch
    5. push the new weights; rollouts of the next step come from them   client.push_weights

The service runs on this machine: Ray Serve, a vLLM engine with blockwise FP8 weights and FP8 KV cache, and the ingest
that quantizes what we push. The trainer is this process; it knows the service's address and nothing else.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from examples.digits_task import make_prompts, reward, warm_start
from examples.report import Report, StepRecord
from rollout_service.client import SyncRolloutClient
from rollout_service.correction import Mismatch, measure_mismatch, truncated_importance_weights
from rollout_service.local import running_service
from rollout_service.types import Rollout

PROMPTS_PER_STEP = 32
COMPLETIONS_PER_PROMPT = 16
TEMPERATURE = 1.0
LEARNING_RATE = 2e-4
TIS_CAP = 2.0
"""Importance weights are cut off here."""


@dataclass
class Batch:
    """Rollouts of one step as tensors; B = prompts × completions, T = longest completion, padded."""

    tokens: torch.Tensor
    """Prompt and completion, int64 [B, P + T]."""
    mask: torch.Tensor
    """Which of the T positions are tokens, bool [B, T]."""
    rollout_logprobs: torch.Tensor
    """As the service returned them, fp32 [B, T]."""
    advantages: torch.Tensor
    """fp32 [B, 1]."""
    mean_reward: float


def main(
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=10)] = 40,
    seed: Annotated[int, typer.Option(help="Of the prompts and the warm start.")] = 0,
    config: Annotated[Path, typer.Option(help="Deployment to run.")] = Path("deployments/cpu_rollout.yaml"),
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.png.")] = Path("out/demo"),
) -> None:
    """Train a small model to write digits backwards, with rollouts from an FP8 service, and report how it went."""
    report = Report(out, steps)
    disable_progress_bar()  # transformers' own
    try:
        report.say("starting the service: Ray Serve, the ingest and a vLLM engine (about a minute)")
        with running_service(config, {"weights": {"root": out / "weights"}}) as service:
            report.say(f"the service answers at {service.url}")
            with SyncRolloutClient(service.url) as client:
                train(client, service.config.model.path, steps, seed, report)
    except KeyboardInterrupt:
        report.say("interrupted: the service is stopped")
        raise typer.Exit(130) from None
    raise typer.Exit(report.finish())


def train(client: SyncRolloutClient, model_path: Path, steps: int, seed: int, report: Report) -> None:
    """The whole training: warm start, then ``steps`` of GRPO."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    report.say("warm start: a short supervised phase, so that there is something to reinforce (under a minute)")
    report.say(f"warm start took {warm_start(model, tokenizer, seed)} supervised steps")

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    version = client.fleet().latest_version + 1
    client.push_weights(version, in_bf16(model))
    with report.progress():
        for step in range(steps):
            set_learning_rate(optimizer, step, steps)

            # 1. Rollouts. The service names the weights of every token: nothing here may be stale.
            started = time.perf_counter()
            prompts = make_prompts(rng, PROMPTS_PER_STEP)
            rollouts = client.generate_batch(
                prompts, n=COMPLETIONS_PER_PROMPT, max_tokens=8, temperature=TEMPERATURE, min_weight_version=version
            )
            require_version(rollouts, version)
            rollout_s = time.perf_counter() - started

            # 2. and 3. Rewards, advantages, one optimizer step.
            batch = make_batch(prompts, rollouts, tokenizer)
            mismatch, logprobs = optimize(model, optimizer, batch)

            # 4. The service keeps the mismatch of every version and replica, and says when one is suspect.
            client.report_mismatch(rollouts, logprobs)

            # 5. New weights, quantized once by the ingest; push_weights returns when every replica serves them.
            started = time.perf_counter()
            version += 1
            client.push_weights(version, in_bf16(model))
            report.record(
                StepRecord(
                    version=version,
                    reward=batch.mean_reward,
                    mismatch_k3=mismatch.k3,
                    tokens=int(batch.mask.sum()),
                    rollout_s=rollout_s,
                    update_s=time.perf_counter() - started,
                )
            )


def make_batch(prompts: list[str], rollouts: list[Rollout], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Score the completions and pad them to one length."""
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    longest = max(len(completion.token_ids) for completion in completions)
    tokens, mask, logprobs = [], [], []
    for rollout in rollouts:
        for completion in rollout.completions:
            padding = longest - len(completion.token_ids)
            tokens.append([*rollout.prompt_token_ids, *completion.token_ids, *[tokenizer.pad_token_id] * padding])
            mask.append([True] * len(completion.token_ids) + [False] * padding)
            logprobs.append([*completion.logprobs, *[0.0] * padding])
    rewards = torch.tensor(
        [[reward(p, c.text or "") for c in r.completions] for p, r in zip(prompts, rollouts, strict=True)]
    )
    return Batch(
        tokens=torch.tensor(tokens),
        mask=torch.tensor(mask),
        rollout_logprobs=torch.tensor(logprobs),
        advantages=group_advantages(rewards).view(-1, 1),
        mean_reward=float(rewards.mean()),
    )


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """GRPO's advantage [prompts, n]: how much better a completion is than the others of its prompt (DeepSeekMath)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def optimize(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Mismatch, torch.Tensor]:
    """One step of policy gradient; returns how far the rollout policy was from the trainer's, whose logprobs [B, T]."""
    length = batch.mask.shape[1]
    logits = model(batch.tokens[:, :-1], use_cache=False, logits_to_keep=length).logits / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, -length:, None])[..., 0]

    # The engine sampled from FP8 weights, activations and cache; we differentiate the full-precision policy. Truncated
    # importance sampling weighs each token by trainer / rollout probability, cut off at C, so that the gradient is that
    # of the policy which we train and not of the one that happened to sample.
    weights = truncated_importance_weights(logprobs.detach(), batch.rollout_logprobs, batch.mask, cap=TIS_CAP)
    loss = -(weights * batch.advantages * logprobs * batch.mask).sum() / batch.mask.sum()

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return measure_mismatch(logprobs.detach(), batch.rollout_logprobs, batch.mask), logprobs.detach()


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Five steps of warm-up, then linear decay to a fifth."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 5) * (1 - 0.8 * step / steps)


def in_bf16(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights as they travel: Hugging Face's names, half the bytes of the fp32 masters."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def require_version(rollouts: list[Rollout], version: int) -> None:
    """Every token of every completion was made by the weights that were pushed last. Raises RuntimeError otherwise."""
    for rollout in rollouts:
        for completion in rollout.completions:
            if completion.versions != (version,):
                raise RuntimeError(f"pushed version {version}, but a completion names {completion.spans}")


if __name__ == "__main__":
    typer.run(main)
