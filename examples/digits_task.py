"""The demo's task: write five digits backwards. ``40917>`` asks for ``71904`` and the end of the sequence.

Small enough for a CPU, and its reward can be checked: the share of digits in the right place.
"""

import random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

DIGITS = 5
ANSWER_TOKENS = DIGITS + 1
"""The digits and the end of the sequence."""

CARELESS = 0.85
"""Share of its probability that the careless teacher of ``warm_start`` spreads over all ten digits."""
CARELESS_STEPS = 30


def make_prompts(rng: random.Random, count: int) -> list[str]:
    """Questions."""
    return ["".join(rng.choice("0123456789") for _ in range(DIGITS)) + ">" for _ in range(count)]


def answer(prompt: str) -> str:
    """What a prompt asks for."""
    return prompt[:DIGITS][::-1]


def reward(prompt: str, completion: str) -> float:
    """Share of the digits that are right, in [0, 1]."""
    return sum(a == b for a, b in zip(answer(prompt), completion, strict=False)) / DIGITS


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> int:
    """Teach ``model`` the task, then make it unsure of it; returns the number of supervised steps.

    GRPO reinforces what the policy samples now and then. A model with random weights never samples anything worth
    reinforcing, so a supervised phase first shows it right answers until it can do it, and then a careless teacher,
    most of whose digits are random, until it does it badly: about 3 digits in 10 are right.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    steps, right = 0, 0.0
    while right < 0.99 and steps < 600:
        right = 0.8 * right + 0.2 * _supervised_step(model, tokenizer, optimizer, rng, careless=0.0)
        steps += 1
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    for _ in range(CARELESS_STEPS):
        _supervised_step(model, tokenizer, optimizer, rng, careless=CARELESS)
        steps += 1
    return steps


def _supervised_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
    careless: float,
) -> float:
    """One step on 64 questions; ``careless`` of the probability is spread over all digits. Returns the share right."""
    prompts = make_prompts(rng, 64)
    questions = torch.tensor(tokenizer(prompts)["input_ids"])
    answers = torch.tensor(tokenizer([answer(p) + tokenizer.eos_token for p in prompts])["input_ids"])
    inputs = torch.cat([questions, answers], dim=1)[:, :-1]
    logits = model(inputs, use_cache=False, logits_to_keep=ANSWER_TOKENS).logits
    wanted = torch.nn.functional.one_hot(answers, logits.shape[-1]).float()
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    wanted[:, :DIGITS] *= 1 - careless
    wanted[:, :DIGITS, digits] += careless / len(digits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((logits.argmax(-1) == answers)[:, :DIGITS].float().mean())
