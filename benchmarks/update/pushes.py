"""A trainer's model and its pushes, timed."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_service.client import SyncRolloutClient

FIRST_PUSHES = 3
"""Told apart from later ones, whose median is the headline."""


def trainer_model(model: Path, device: str) -> torch.nn.Module:
    """Return a BF16 model with random weights on the device."""
    with torch.device(device):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        )
    return made


def pushed(
    client: SyncRolloutClient, trainer: torch.nn.Module, transport: str, pushes: int, *, send: bool = True
) -> dict[str, Any]:
    """Push versions whose weights all differ a little; return the seconds of each, and how long engines closed.

    ``transport``: one of ``push_weights``; with ``:trainer`` behind it, the trainer quantizes. ``send``: False on the
    ranks of a sharded trainer that only take part.
    """
    name, _, quantizer = transport.partition(":")
    options: dict[str, Any] = {"transport": name, "send": send} | ({"quantize": quantizer} if quantizer else {})
    push_s, closed_s, sent = list[float](), list[float](), list[int]()
    for _ in range(pushes):
        with torch.no_grad():
            for weights in trainer.parameters():
                local = weights.to_local() if hasattr(weights, "to_local") else weights  # the shard of this rank
                local.add_(torch.randn_like(local) * 1e-5 * local.abs().mean())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        status = client.push_weights("next", trainer.state_dict(), **options)
        push_s.append(time.perf_counter() - started)
        if status is not None:
            closed_s.append(max(replica.update.closed_s for replica in client.fleet().replicas if replica.update))
            sent.append(status.uploaded_bytes or 0)
        time.sleep(1.0)  # a trainer's step lasts longer
    return {
        "first_push_s": push_s[:FIRST_PUSHES],
        "push_s": push_s[FIRST_PUSHES:],
        "median_push_s": statistics.median(push_s[FIRST_PUSHES:] or push_s),
        "closed_s": closed_s,
        "uploaded_bytes": sent[-1] if sent else 0,
    }
