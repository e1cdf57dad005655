"""Seconds of calls: by this process's clock, and on a GPU by its own events."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def wall_seconds(call: Callable[[], object], repeats: int, *, warm_up: int = 1) -> list[float]:
    """Seconds of each call, after some that are not counted."""
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def event_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call on the GPU, after one to warm up."""
    call()
    events = [(_event(), _event()) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds a call, back to back in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), 4
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return [s / (rounds * len(calls)) for s in event_seconds(graph.replay, repeats)]


def buffers_beyond_cache(nbytes: int) -> int:
    """Return how many of this size fill the GPU's cache four times; two at least."""
    cache_bytes: int = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, 4 * cache_bytes // nbytes + 1)


def copy_seconds(nbytes: int, device: str, repeats: int) -> float:
    """Median seconds of a copy of so many bytes, ``cuda`` or ``cpu``: it reads and writes each of them once."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    measure: Callable[[Callable[[], Any], int], list[float]] = event_seconds if device == "cuda" else wall_seconds
    return statistics.median(measure(lambda: target.copy_(source), repeats))
