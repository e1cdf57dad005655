"""What a process's GPU did between two moments: routes of a benchmark's server, and a summary of the trace."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from benchmarks.common.results import Json

BEGIN, END = "/benchmark/gpu-trace/begin", "/benchmark/gpu-trace/end"
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")


def add_gpu_trace(app: FastAPI) -> None:
    """Two routes: POST ``BEGIN``, and POST ``END``, which answers with ``summary``; {} where there is no GPU."""
    running: list[torch.profiler.profile] = []

    @app.post(BEGIN)
    async def begin() -> None:
        if torch.cuda.is_available():
            running.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]))
            running[-1].start()

    @app.post(END)
    async def end() -> Json:
        if not running:
            return {}
        profile = running.pop()
        profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            return summary(json.loads(file.read_text())["traceEvents"])


def summary(events: Iterable[dict[str, Any]], top: int = 25) -> Json:
    """Of a Chrome trace: seconds from the first to the last thing that the GPU did, those in which it did any, and of
    each kernel and kind of copy its count, its seconds (together: they overlap) and a copy's bytes. ``calls``: likewise
    of CUDA's functions, in which threads of the host were, of all threads together."""
    all_events = list(events)
    events = [event for event in all_events if event.get("cat") in KINDS]
    if not events:
        return {}
    work, calls = _added_up(events), _added_up(event for event in all_events if event.get("cat") in CALLS)
    begin, end, busy = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events), 0.0
    until = begin
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        busy += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return {
        "span_s": (end - begin) / 1e6,
        "busy_s": busy / 1e6,
        "work": dict(list(work.items())[:top]),
        "calls": dict(list(calls.items())[:top]),
    }


def _added_up(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By name, the one that took longest first."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        one = found.setdefault(event["name"][:80], {"count": 0, "seconds": 0.0, "bytes": 0})
        one["count"] += 1
        one["seconds"] += event["dur"] / 1e6
        one["bytes"] += event.get("args", {}).get("bytes", 0)
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))
