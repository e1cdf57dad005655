"""Seconds on a GPU, by its own events."""

from collections.abc import Callable
from typing import Any

import torch


def buffers_beyond_cache(nbytes: int) -> int:
    """So many of this size fill the GPU's cache four times; two at least."""
    cache_bytes: int = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, 4 * cache_bytes // nbytes + 1)


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
