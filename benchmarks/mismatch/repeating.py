"""Small models, trained on the spot to repeat what they have read, which takes attention: random weights say little."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.models import FAMILIES

PERIOD, TRAINED_TOKENS, FIRST_TOKEN = 16, 64, 8
"""After so many tokens a sequence repeats itself; length of those trained on; ids below are special tokens."""


def repeating(count: int, seed: int, tokens: int = TRAINED_TOKENS) -> torch.Tensor:
    """Sequences [count, tokens] that repeat their first tokens over and over."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(FIRST_TOKEN, 128, (count, PERIOD), generator=generator)
    return start.repeat(1, -(-tokens // PERIOD))[:, :tokens]


def train(family: str, folder: Path, steps: int, batch: int, device: str = "cpu") -> float:
    """Save a model of the family in BF16 after so many steps of AdamW; returns its last loss in nats a token."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices: a second thread waits more than it works
    shape = FAMILIES[family]()
    one_by_one = {"experts_implementation": "eager"} if device != "cpu" and hasattr(shape, "num_experts") else {}
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, **one_by_one).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in range(steps):
        sequences = repeating(batch, step).to(device)
        loss = model(sequences, labels=sequences).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    return float(loss)
