"""GRPO whose rollouts run over updates, and the mismatch of their tokens by the age of the keys and values they read.

Batches are sampled ahead of the one that is trained on, so an update finds rollouts under way. The mismatch compares
each token with the trainer's own logprob by the weights that sampled it: what is left is the engine's arithmetic and
the older keys and values, without the policy's progress.
"""

import functools
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples import grpo
from examples.as_engine import InBf16
from rollout_service.client import SyncRolloutClient
from rollout_service.correction import Correction
from rollout_service.correction.ratios import k3, mult_prob_error
from rollout_service.protocol.rollout import Rollout, Span

Weights = dict[str, torch.Tensor]


@dataclass
class OverlappedStep(grpo.Step):
    """A step whose ``logprobs`` are by the weights that sampled each token."""

    kv_ages: torch.Tensor  # age of the oldest keys and values that each token may have read, in versions, int64 [B, T]


def train(
    client: SyncRolloutClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    seed: int,
    *,
    task: grpo.Task,
    correction: Correction,
    ahead: int,
    pushed: Callable[[PreTrainedModel], Weights] = grpo.in_bf16,
    policy: InBf16 | None = None,
) -> Iterator[OverlappedStep]:
    """Train as ``grpo.train`` does, with ``ahead`` ≥ 1 further batches under way."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    version = client.push_weights("next", pushed(model)).version
    weights = {version: snapshot(model)}
    with ThreadPoolExecutor(ahead) as pool:

        def sample(version: int) -> tuple[list[str], Future[list[Rollout]]]:
            prompts = task.make_prompts(rng, task.prompts)
            generate = functools.partial(
                client.generate_batch,
                n=task.completions,
                max_tokens=task.max_tokens,
                temperature=grpo.TEMPERATURE,
                min_weight_version=version,
            )
            return prompts, pool.submit(generate, prompts)

        # the batch that a step samples is trained on ``ahead`` steps later: no rollout gets older than that
        under_way = deque(sample(version) for _ in range(min(ahead, steps)))
        for step in range(steps):
            grpo.set_learning_rate(optimizer, task.learning_rate, step, steps)
            started = time.perf_counter()
            prompts, sampling = under_way.popleft()
            rollouts = sampling.result()
            rollout_s = time.perf_counter() - started
            if step + len(under_way) + 1 < steps:
                under_way.append(sample(version))

            batch = grpo.make_batch(task, prompts, rollouts, tokenizer, model.device)
            dtype = model.dtype if policy is None else torch.bfloat16
            sampled = logprobs_of_versions(model, weights, rollouts, batch, dtype)
            _, metrics = grpo.optimize(model, optimizer, batch, correction, policy)
            client.report_mismatch(rollouts, grpo.of_completions(sampled, batch))

            started = time.perf_counter()
            newer = client.push_weights("next", pushed(model)).version
            update_s = time.perf_counter() - started
            ages = of_tokens(rollouts, batch, lambda span: span.version - span.oldest_kv)
            yield OverlappedStep(version, batch, sampled, metrics, rollout_s, update_s, ages)
            version = newer
            weights[version] = snapshot(model)
            for old in sorted(weights)[: -(ahead + 1)]:  # the next batch began with the first that is left
                del weights[old]


def snapshot(model: PreTrainedModel) -> Weights:
    """Return a copy of the parameters as they travel, in BF16 and in the host's memory."""
    return {name: each.detach().to("cpu", torch.bfloat16, copy=True) for name, each in model.named_parameters()}


def of_tokens(rollouts: list[Rollout], batch: grpo.Batch, value: Callable[[Span], int]) -> torch.Tensor:
    """Return a value of each token's span, int64 [B, T]; 0 elsewhere."""
    found = torch.zeros_like(batch.mask, dtype=torch.int64)
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    for row, mask, completion in zip(found, batch.mask, completions, strict=True):
        values = [value(span) for span in completion.spans for _ in range(span.start, span.end)]
        row[mask] = torch.tensor(values, device=row.device)
    return found


@torch.no_grad()
def logprobs_of_versions(
    model: PreTrainedModel, weights: dict[int, Weights], rollouts: list[Rollout], batch: grpo.Batch, dtype: torch.dtype
) -> torch.Tensor:
    """Return each token's logprob by the weights that sampled it, computed in ``dtype``; fp32 [B, T]."""
    versions = of_tokens(rollouts, batch, lambda span: span.version)
    length, found = batch.mask.shape[1], torch.zeros_like(batch.rollout_logprobs)
    for version in versions[batch.mask].unique().tolist():
        rows = ((versions == version) & batch.mask).any(1)
        parameters = {name: each.to(model.device, dtype) for name, each in weights[version].items()}
        options = {"use_cache": False, "logits_to_keep": length}
        logits = torch.func.functional_call(model, parameters, (batch.tokens[rows, :-1],), options).logits.float()
        logprobs = (logits / grpo.TEMPERATURE).log_softmax(-1)
        of_rows = logprobs.gather(-1, batch.tokens[rows, -length:, None])[..., 0]
        found[rows] = torch.where((versions == version)[rows], of_rows, found[rows])
    return found


class MismatchByAge:
    """The mismatch of a run's tokens, summed by the age of the keys and values that they read."""

    def __init__(self) -> None:
        self._sums: defaultdict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(5, dtype=torch.float64))
        self._fresh = torch.full((2,), math.nan, dtype=torch.float64)
        """k3 and probability error of age 0 in the newest step that had tokens of age 0."""

    def add(self, step: OverlappedStep) -> None:
        """Add a step's tokens."""
        mask = step.batch.mask
        log_ratio = (step.logprobs - step.batch.rollout_logprobs)[mask].double()
        ages = step.kv_ages[mask]
        for age in ages.unique().tolist():  # sorted: 0 first
            of_age = log_ratio[ages == age]
            sums = torch.stack([k3(of_age).sum(), mult_prob_error(of_age).sum()]).cpu()
            if age == 0:
                self._fresh = sums / of_age.numel()
            self._sums[age] += torch.cat([torch.tensor([of_age.numel()]), sums, self._fresh * of_age.numel()])

    def rows(self) -> list[dict[str, float]]:
        """Return tokens and means of each age: k3 and probability error, as ``KVAgeRow`` has them, and of age 0."""
        names = ("k3", "prob_error", "k3_of_age_0", "prob_error_of_age_0")
        return [
            {"age": age, "tokens": int(sums[0])} | dict(zip(names, (sums[1:] / sums[0]).tolist(), strict=True))
            for age, sums in sorted(self._sums.items())
        ]
