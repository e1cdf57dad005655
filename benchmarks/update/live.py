"""Seconds from a trainer's last byte until every replica serves the new version, through the whole service; on a GPU.

    python -m benchmarks.update.live [--model qwen3-8b] [--transport path --transport parts --transport shared_memory]
    python -m benchmarks.rollout.throughput … --transport path …    the same after its own measurements

Random weights of a published shape; the service holds them in FP8 with an FP8 KV cache, in an engine with the arguments
of ``benchmarks.rollout.throughput``'s documented run, and ``--concurrent`` rollouts run through its HTTP all the while.
Transports:

- ``path``: the service reads a folder of BF16 files and quantizes; the last byte was there before it was told;
- ``parts``: BF16 over HTTP, quantized by the service, parts as they come;
- ``trainer``: codes and scales over HTTP, quantized by this process;
- ``shared_memory``: BF16 through memory that this process and the ingest share, quantized by the service;
- ``delta``: what has changed in codes, scales and BF16 tensors over HTTP, quantized and compared by this process. Of 2%
  of the BF16 weights the last bit changes between two versions (``benchmarks.update.delta`` measures steps of an
  optimizer); for all other transports every weight does. The first push, of everything, is not measured;
- ``delta_gpu``: the same, and what was sent last stays on the trainer's GPU (``RolloutClient(delta_base="gpu")``).

This process is the trainer: it has its weights on a GPU, the engine's own if it sees no other, and changes all of them
for each version. With the log in memory the first versions after a start are slower, as each process registers the
memory of three versions with CUDA: these pushes, ``--warmups`` of them by the first transport, are ``first_push_s``.

``all_live_s`` is from the last part's acknowledgement, or for ``path`` from the call, until the commit is answered:
what is left is converted and synced to disk, and each replica has checked, staged and loaded it. ``push_s`` is the
whole push. Both hold what the ingest's disk takes: ``--folder`` is memory if it is a tmpfs. With ``--behind`` versions
are copied from there to a disk meanwhile (``weights.durability: behind``). Adds its cases to
benchmarks/results/<machine>/update_live.json, in place of earlier ones of the same model, transport and durability.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import (
    ENGINES_SHARE,
    EngineOptions,
    Mode,
    ModelOptions,
    fitting,
    remove_weights,
    serving,
    settings_of,
    write_weights,
)
from benchmarks.common.random_weights import gaussian
from benchmarks.common.shapes import write_config
from benchmarks.common.work import WorkOptions
from benchmarks.update.busy import busy
from rollout_service.client import RolloutClient
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.store.mapped_files import is_in_memory

RESULT = "update_live"
SAME = ("model", "door", "layers", "scales_policy", "durability")
"""Fields in which two cases agree that measured the same."""
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256
DELTA_SHARE = 0.02
"""Of BF16 weights, that differ between two versions."""


class Transport(StrEnum):
    """How a trainer sends a version."""

    PATH = "path"
    PARTS = "parts"
    TRAINER = "trainer"
    SHARED_MEMORY = "shared_memory"
    DELTA = "delta"
    DELTA_GPU = "delta_gpu"

    @property
    def is_delta(self) -> bool:
        """Whether what has changed is sent."""
        return self in (Transport.DELTA, Transport.DELTA_GPU)


class PushOptions(Options):
    """What is pushed."""

    transport: tuple[Transport, ...] = tuple(Transport)
    """May be repeated."""
    repeats: int = 5
    """Versions by each transport."""
    warmups: int = 3
    """Versions before those, by the first transport."""
    gpu_share: float = ENGINES_SHARE
    """Of the GPU's memory, the engine's: the trainer's weights need room, too."""
    concurrent: int = 64
    """Rollouts that run meanwhile."""
    scales_policy: str = "reuse"
    """Of the KV cache: reuse, calibrate or unit."""
    behind: Path | None = None
    """A folder on a disk, in which a log lies behind that in memory; None: there is none."""


class LiveEngine(EngineOptions):
    """The engine."""

    block_size: int | None = 64
    """Tokens of a page of the KV cache."""
    batched_tokens: int | None = 8192
    """Tokens of a step."""
    graph_step: int | None = 16
    """CUDA graphs for multiples of it."""


@dataclass
class Case:
    """One transport of one model."""

    model: str
    door: str
    """The transport. Results have had it under this key since the first."""
    layers: int | None
    scales_policy: str = "reuse"
    """``kv_cache.scales_policy``: with ``calibrate`` the scales are measured while the engine is closed."""
    durability: str = "before_live"
    """``weights.durability``."""
    log: str = "disk"
    """Where versions are served from: disk or memory."""
    sent_gbytes: float = 0.0
    """What the trainer's files or parts hold."""
    gbytes: float = 0.0
    """Of the stored version, which a replica loads."""
    first_push_s: list[float] = field(default_factory=list)
    """Of the versions before those of ``push_s``, while memory was registered."""
    push_s: list[float] = field(default_factory=list)
    all_live_s: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    """These three as the replica reports them: ``UpdateTimings``."""

    def add(self, timings: UpdateTimings) -> None:
        """Of one replica's last update."""
        self.stage_s.append(timings.stage_s)
        self.closed_s.append(timings.closed_s)
        self.load_s.append(timings.load_s)


class LastByte:
    """Of an upload: when the service had it."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.nbytes = 0

    def progress(self, done: int, total: int) -> None:
        """For ``push_weights``."""
        self.nbytes = total
        if done == total:
            self.at = time.perf_counter()


class Trainer:
    """A model's BF16 weights, on a GPU if there is one."""

    def __init__(self, folder: Path) -> None:
        """``folder``: has its config.json."""
        self.tensors = {name: gaussian(shape) for name, shape in ServedModel.load(folder).shapes.items()}

    def step(self, share: float = 1.0) -> None:
        """Other weights, as large. ``share``: of them changes, by the last bit if that is less than all."""
        for tensor in self.tensors.values():
            if share == 1:
                tensor.neg_()
            else:
                tensor.view(torch.int16).bitwise_xor_(torch.rand(tensor.shape, device=tensor.device) < share)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


async def push(client: RolloutClient, version: int, folder: Path, case: Case, trainer: Trainer | None = None) -> None:
    """One version by the case's transport, until all replicas serve it. ``trainer``: made here if it is None."""
    if case.door != Transport.PATH:
        trainer = trainer or Trainer(folder)
        trainer.step(DELTA_SHARE if Transport(case.door).is_delta else 1.0)
    last = LastByte()
    started = time.perf_counter()
    if case.door == Transport.PATH:
        last.at, last.nbytes = started, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        status = await client.push_path(version, folder)
    else:
        assert trainer is not None
        how: dict[str, Any]
        if Transport(case.door).is_delta:
            how = {"transport": "delta"}
        elif case.door == Transport.SHARED_MEMORY:
            how = {"transport": "shared_memory"}
        else:
            how = {"transport": "http", "quantize": "trainer" if case.door == Transport.TRAINER else "service"}
        status = await client.push_weights(version, trainer.tensors, progress=last.progress, **how)
    ended = time.perf_counter()
    if last.at is None or status.state != "live":
        raise RuntimeError(f"version {version} is {status.state}, and its last byte came at {last.at}")
    case.sent_gbytes, case.gbytes = last.nbytes / 1e9, (status.total_bytes or 0) / 1e9
    case.push_s.append(ended - started)
    case.all_live_s.append(ended - last.at)
    for replica in (await client.fleet()).replicas:
        if replica.update is None:
            raise RuntimeError(f"replica {replica.replica_id} has told no timings")
        case.add(replica.update)


def rollouts(client: RolloutClient, concurrent: int) -> AbstractAsyncContextManager[None]:
    """So many at any time."""

    def request(number: int) -> Awaitable[object]:
        prompt = list(range(number + 10, number + 10 + PROMPT_TOKENS))
        return client.generate(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    return busy(concurrent, request)


@dataclass(frozen=True)
class Updates:
    """What is pushed, by which transports, and what else goes on."""

    cases: list[Case]
    folder: Path
    """The BF16 files, and no others."""
    repeats: int
    concurrent: int
    warmups: int = 0

    async def measure(self, url: str) -> None:
        """All cases, with a running service whose version 0 has taught it its load plan. Each is kept once done."""
        version = 0
        trainer = None if all(case.door == Transport.PATH for case in self.cases) else Trainer(self.folder)
        async with (
            RolloutClient(url) as client,
            RolloutClient(url, delta_base="gpu") as with_base_on_gpu,
            rollouts(client, self.concurrent),
        ):
            for number, case in enumerate(self.cases):
                pushing = with_base_on_gpu if case.door == Transport.DELTA_GPU else client
                for _ in range(self.warmups if number == 0 else int(Transport(case.door).is_delta)):
                    first = replace(case, push_s=case.first_push_s, all_live_s=[], stage_s=[], closed_s=[], load_s=[])
                    await push(pushing, version := version + 1, self.folder, first, trainer)
                for _ in range(self.repeats):
                    await push(pushing, version := version + 1, self.folder, case, trainer)
                keep(case, self.concurrent)
                print(json.dumps(asdict(case)), flush=True)


def keep(case: Case, concurrent: int) -> Path:
    """Add it to the result, in place of an earlier one of the same model and transport."""
    new = asdict(case) | {"concurrent": concurrent}
    earlier = [{"durability": "before_live"} | case for case in results.cases(RESULT)]  # once there was no other
    return results.write(RESULT, {"cases": results.joined(earlier, [new], SAME)})


def table_of(cases: list[Case]) -> Table:
    """For people: medians."""
    table = Table(title=f"seconds from the last byte to all live, on {results.machine()}")
    for column in ("model", "transport", "GB sent", "GB", "push", "all live", "of it staging", "closed"):
        table.add_column(column, justify="left" if column in ("model", "transport") else "right")
    for c in cases:
        seconds = [f"{statistics.median(values):.3f}" for values in (c.push_s, c.all_live_s, c.stage_s, c.closed_s)]
        table.add_row(c.model, c.door, f"{c.sent_gbytes:.2f}", f"{c.gbytes:.2f}", *seconds)
    return table


def main(model: ModelOptions, pushes: PushOptions, engine: LiveEngine) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/update_live.json."""
    durability = "before_live" if pushes.behind is None else "behind"
    log = "memory" if is_in_memory(model.folder) else "disk"
    cases = [
        Case(model.model, transport, model.layers, pushes.scales_policy, durability, log)
        for transport in pushes.transport
    ]
    work = WorkOptions()  # not done: it makes the engine that benchmarks.rollout.throughput has
    with (
        tempfile.TemporaryDirectory(dir=model.folder) as temporary,
        tempfile.TemporaryDirectory(dir=pushes.behind) as behind,
    ):
        path = write_config(model.model, Path(temporary) / model.model, model.layers)
        write_weights(path)
        settings = settings_of(Mode.FP8KV, path, path.parent, fitting(work) | engine.settings(work.sequences))
        settings["kv_cache"]["scales_policy"] = pushes.scales_policy
        settings["engine"]["gpu_memory_utilization"] = pushes.gpu_share
        if pushes.behind is not None:
            settings["weights"] |= {"durability": durability, "durable_root": behind}
        with serving(settings, path.parent, model.verbose) as service:
            if model.free:
                remove_weights(path)
            asyncio.run(Updates(cases, path, pushes.repeats, pushes.concurrent, pushes.warmups).measure(service.url))
    console = Console()
    console.print(table_of(cases))
    console.print(f"added to {results.path(RESULT)}")


if __name__ == "__main__":
    run(main)
