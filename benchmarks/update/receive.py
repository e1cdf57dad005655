"""Seconds until an ingest has a version, by each transport, without engines, and what they go into.

    python -m benchmarks.update.receive --model qwen3-8b --folder /dev/shm
    python -m benchmarks.update.receive --layers 2 --transport shared_memory --transport parts

Random weights of a published shape in this process, on a GPU if there is one, all of them changed for each version; the
ingest in a process of its own, without Ray, its log in ``--folder``, on the same GPU. It starts in seconds, where
``benchmarks.update.live`` starts an engine. ``push_s`` is the whole push, ``stages`` are ``UploadTimings``; *quantize*
and *store* are those of all threads together, and so is the processor time of each process. On a GPU one push more is
traced (``gpu``): what the ingest's GPU did, and for how long.
"""

import asyncio
import functools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import write_weights
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, write_config
from benchmarks.update.gpu_trace import BEGIN, END
from benchmarks.update.live import DELTA_SHARE, Trainer, Transport
from benchmarks.update.upload_servers import process, serve_ingest
from rollout_service.client import RolloutClient

RESULT = "update_receive"
SAME = ("model", "layers", "transport")
WITHOUT_ENGINES = (
    Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.TRAINER, Transport.PARTS, Transport.DELTA
)  # fmt: skip


class ReceiveOptions(Options):
    """What is pushed."""

    model: Shape = Shape.QWEN3_8B
    """Whose shapes."""
    layers: int | None = None
    """Fewer layers than the published model."""
    folder: Path = SHARED_MEMORY
    """Where the log is put."""
    transport: tuple[Transport, ...] = WITHOUT_ENGINES
    """May be repeated."""
    repeats: int = 5
    """Versions by each transport, after three that are not counted."""


@dataclass
class Case:
    """One transport."""

    model: str
    layers: int | None
    transport: str
    first_push_s: list[float] = field(default_factory=list)
    """While memory was taken and registered."""
    push_s: list[float] = field(default_factory=list)
    client_cpu_s: list[float] = field(default_factory=list)
    ingest_cpu_s: list[float] = field(default_factory=list)
    """Processor time of each process, user and system, for each of ``push_s``."""
    gbytes: float = 0.0
    """Of the stored version."""
    stages: list[dict[str, float]] = field(default_factory=list)
    gpu: Json = field(default_factory=dict)


def how(transport: Transport) -> dict[str, Any]:
    """Arguments of ``push_weights``."""
    if transport in (Transport.PARTS, Transport.TRAINER):
        return {"transport": "http", "quantize": "trainer" if transport == Transport.TRAINER else "service"}
    return {"transport": str(transport)}


async def measure(options: ReceiveOptions, url: str, ingest: int, trainer: Trainer) -> list[Case]:
    """All transports; each is kept once it is done. ``ingest``: its process."""
    cases: list[Case] = []
    processes = psutil.Process(), psutil.Process(ingest)
    version = 0
    async with RolloutClient(url) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:

        def step(transport: Transport) -> None:
            trainer.step(DELTA_SHARE if transport == Transport.DELTA else 1.0)

        async def push(transport: Transport, seconds: list[float]) -> dict[str, float]:
            nonlocal version
            version += 1
            began = time.perf_counter()
            status = await client.push_weights(version, trainer.tensors, wait="none", **how(transport))
            seconds.append(time.perf_counter() - began)
            case.gbytes = (status.total_bytes or 0) / 1e9
            return {} if status.timings is None else status.timings.model_dump()

        for transport in options.transport:
            if transport == Transport.CUDA_IPC and not torch.cuda.is_available():
                print("cuda_ipc: not measured, there is no GPU", flush=True)
                continue
            case = Case(options.model, options.layers, transport)
            for _ in range(3):
                step(transport)
                await push(transport, case.first_push_s)
            for _ in range(options.repeats):
                step(transport)
                before = [cpu_s(each) for each in processes]
                case.stages.append(await push(transport, case.push_s))
                for seconds, each, at_first in zip(
                    (case.client_cpu_s, case.ingest_cpu_s), processes, before, strict=True
                ):
                    seconds.append(cpu_s(each) - at_first)
            if torch.cuda.is_available():
                (await http.post(BEGIN)).raise_for_status()
                step(transport)
                await push(transport, [])
                case.gpu = (await http.post(END)).raise_for_status().json()
            cases.append(case)
            results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [asdict(case)], SAME)})
            print(json.dumps(asdict(case)), flush=True)
    return cases


def cpu_s(process: psutil.Process) -> float:
    """Seconds that its threads have run, those that have ended included."""
    times = process.cpu_times()
    return float(times.user + times.system)


def table_of(cases: list[Case]) -> Table:
    """For people: medians."""
    table = Table(title=f"seconds until an ingest has a version, on {results.machine()}")
    columns = (
        "transport",
        "GB",
        "push",
        "receive",
        "quantize",
        "store",
        "finish",
        "client CPU",
        "ingest CPU",
        "GPU busy",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "transport" else "right")
    for case in cases:
        stages = [
            f"{statistics.median(stage[name] for stage in case.stages):.3f}"
            for name in ("receive_s", "quantize_s", "store_s", "finish_s")
        ]
        stages += [f"{statistics.median(seconds):.2f}" for seconds in (case.client_cpu_s, case.ingest_cpu_s)]
        busy = f"{case.gpu['busy_s']:.3f}" if case.gpu else ""
        table.add_row(case.transport, f"{case.gbytes:.2f}", f"{statistics.median(case.push_s):.3f}", *stages, busy)
    return table


def main(options: ReceiveOptions) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/update_receive.json."""
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        model = write_config(options.model, folder / "model", options.layers)
        write_weights(model)
        server = functools.partial(serve_ingest, folder / "log", on_gpu=torch.cuda.is_available())
        with process(server, folder) as (url, ingest):
            cases = asyncio.run(measure(options, url, ingest, Trainer(model)))
    console = Console()
    console.print(table_of(cases))
    console.print(f"added to {results.path(RESULT)}")


if __name__ == "__main__":
    run(main)
