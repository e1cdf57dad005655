"""Seconds on a GPU, by its own events."""

from collections.abc import Callable
from typing import Any

import torch


def gaussian(shape: tuple[int, ...]) -> torch.Tensor:
    """BF16 of the size that trained weights have."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)


def graph_seconds(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds a call, back to back."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), 4
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return [s / (rounds * len(calls)) for s in event_seconds(graph.replay, repeats)]


def event_seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call on the GPU, after one to warm up."""
    call()
    seconds = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds
