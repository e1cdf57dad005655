"""GRPO with rollouts from the service: a tutorial in one file.

The loop every RL trainer has, in plain PyTorch:

    1. ask the service for n completions of each prompt           client.generate_batch
    2. score them, and compare each with the others of its prompt  group_advantages
    3. step the policy, correcting for FP8                         optimize
    4. tell the service how far its engines were from the trainer  client.report_mismatch
    5. push the new weights; rollouts of the next step come from them   client.push_weights

``grpo_digits`` (``make demo``) runs it once, with ``--fake-quant`` for a policy that computes as the engines do
(``as_engine``); ``benchmarks.training.tis_ablation`` with and without the correction.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.as_engine import InBf16
from examples.digits_task import make_prompts, reward
from rollout_service.client import SyncRolloutClient
from rollout_service.correction import Correction, correct, preset
from rollout_service.protocol.rollout import Rollout

TEMPERATURE = 1.0

TIS = preset("token_tis")
"""Truncated importance sampling: each token weighs trainer / rollout probability, cut off at 2."""


@dataclass(frozen=True)
class Task:
    """Questions with a reward, and the sizes of a step."""

    make_prompts: Callable[[random.Random, int], list[str]]
    """Return that many questions."""
    reward: Callable[[str, str], float]
    """Return the reward of a completion of a prompt, in [0, 1]."""
    prompts: int
    """Per step."""
    completions: int
    """Per prompt."""
    max_tokens: int
    """Per completion."""
    learning_rate: float


DIGITS = Task(make_prompts, reward, prompts=32, completions=16, max_tokens=8, learning_rate=2e-4)


@dataclass
class Batch:
    """Rollouts of one step as tensors; B = prompts × completions, P = shortest prompt, T = tokens after it, padded."""

    tokens: torch.Tensor
    """Prompt and completion, int64 [B, P + T]."""
    mask: torch.Tensor
    """Which of the T positions are tokens of the completion, bool [B, T]."""
    rollout_logprobs: torch.Tensor
    """As the service returned them, fp32 [B, T]."""
    advantages: torch.Tensor
    """fp32 [B, 1]."""
    mean_reward: float
    cut_off: float
    """Share of the completions that ``max_tokens`` ended."""


@dataclass
class Step:
    """What one step has done."""

    version: int
    """That sampled the batch."""
    batch: Batch
    logprobs: torch.Tensor
    """The trainer's, before the optimizer step, fp32 [B, T]."""
    metrics: dict[str, float]
    """``rollout_corr/…``, of the correction that was trained with; ``grad_norm``, before it is clipped to 1."""
    rollout_s: float
    update_s: float
    """From the first byte pushed until every replica serves the version."""


def in_bf16(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights as they travel: Hugging Face's names, half the bytes of the fp32 masters."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def train(
    client: SyncRolloutClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    seed: int,
    *,
    task: Task = DIGITS,
    correction: Correction = TIS,
    pushed: Callable[[PreTrainedModel], dict[str, torch.Tensor]] = in_bf16,
    policy: InBf16 | None = None,
) -> Iterator[Step]:
    """``steps`` of GRPO on ``model``, in place, as an iterator over them: a step is done when it is yielded.

    ``seed`` is that of the prompts; ``pushed`` makes a weight version of the model; ``policy`` computes its logits in
    place of the model itself. Versions go on from the service's newest, the first being the model as it is given, so
    that one service can serve several trainings in turn.

    Raises RuntimeError if a completion was not sampled from the weights pushed last, and what the client raises.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    version = client.push_weights("next", pushed(model)).version
    for step in range(steps):
        set_learning_rate(optimizer, task.learning_rate, step, steps)

        # 1. Rollouts. The service names the weights of every token: nothing here may be stale.
        started = time.perf_counter()
        prompts = task.make_prompts(rng, task.prompts)
        rollouts = client.generate_batch(
            prompts,
            n=task.completions,
            max_tokens=task.max_tokens,
            temperature=TEMPERATURE,
            min_weight_version=version,
        )
        require_version(rollouts, version)
        rollout_s = time.perf_counter() - started

        # 2. and 3. Rewards, advantages, one optimizer step.
        batch = make_batch(task, prompts, rollouts, tokenizer, model.device)
        logprobs, metrics = optimize(model, optimizer, batch, correction, policy)

        # 4. The service keeps the mismatch of every version and replica, and says when one is suspect.
        client.report_mismatch(rollouts, of_completions(logprobs, batch))

        # 5. New weights, quantized once by the ingest; push_weights returns when every replica serves them.
        started = time.perf_counter()
        newer = client.push_weights("next", pushed(model), label=f"grpo/step-{step + 1}").version
        yield Step(version, batch, logprobs, metrics, rollout_s, time.perf_counter() - started)
        version = newer


def make_batch(
    task: Task,
    prompts: list[str],
    rollouts: list[Rollout],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | None = None,
) -> Batch:
    """Score the completions and pad them to one length, at their end."""
    rows = [(rollout.prompt_token_ids, completion) for rollout in rollouts for completion in rollout.completions]
    shortest = min(len(prompt) for prompt, _ in rows)
    width = max(len(prompt) + len(completion.token_ids) for prompt, completion in rows)
    tokens, mask, logprobs = [], [], []
    for prompt, completion in rows:
        length = len(completion.token_ids)
        before, after = len(prompt) - shortest, width - len(prompt) - length
        tokens.append([*prompt, *completion.token_ids, *[tokenizer.pad_token_id] * after])
        mask.append([False] * before + [True] * length + [False] * after)
        logprobs.append([*[0.0] * before, *completion.logprobs, *[0.0] * after])
    rewards = torch.tensor(
        [[task.reward(p, c.text or "") for c in r.completions] for p, r in zip(prompts, rollouts, strict=True)]
    )
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        mask=torch.tensor(mask, device=device),
        rollout_logprobs=torch.tensor(logprobs, device=device),
        advantages=group_advantages(rewards).view(-1, 1).to(device),
        mean_reward=float(rewards.mean()),
        cut_off=sum(completion.finish_reason == "length" for _, completion in rows) / len(rows),
    )


def of_completions(values: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Return the values [B, T] of each completion's own tokens."""
    return [row[mask] for row, mask in zip(values.cpu(), batch.mask.cpu(), strict=True)]


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """GRPO's advantage [prompts, n]: how much better a completion is than the others of its prompt (DeepSeekMath)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def optimize(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    correction: Correction,
    policy: InBf16 | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """One step of policy gradient; returns the trainer's logprobs [B, T] before it, and the correction's metrics."""
    length = batch.mask.shape[1]
    read = batch.tokens[:, :-1]
    if policy is None:
        logits = model(read, use_cache=False, logits_to_keep=length).logits
    else:
        logits = policy.logits(read, length)
    logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, batch.tokens[:, -length:, None])[..., 0]

    # The engine sampled from FP8 weights, activations and cache; we differentiate the full-precision policy. Truncated
    # importance sampling weighs each token by trainer / rollout probability, cut off at C, so that the gradient is that
    # of the policy which we train and not of the one that happened to sample.
    corrected = correct(logprobs.detach(), batch.rollout_logprobs, batch.mask, correction)
    # divided by as many tokens as the correction's source divides by: rejected ones may count or not
    loss = -(corrected.weights * batch.advantages * logprobs).sum() / corrected.denominator

    optimizer.zero_grad()
    loss.backward()
    if policy is not None:
        policy.hand_gradients_over()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return logprobs.detach(), corrected.metrics | {"grad_norm": float(grad_norm)}


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Five steps of warm-up, then linear decay to a fifth."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 5) * (1 - 0.8 * step / steps)


def require_version(rollouts: list[Rollout], version: int) -> None:
    """Every token of every completion was made by the weights that were pushed last. Raises RuntimeError otherwise."""
    for rollout in rollouts:
        for completion in rollout.completions:
            if completion.versions != (version,):
                raise RuntimeError(f"pushed version {version}, but a completion names {completion.spans}")
