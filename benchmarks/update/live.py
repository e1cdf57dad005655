"""Seconds from a trainer's last byte until every replica serves the new version, through the whole service; on a GPU.

    python -m benchmarks.update.live [--model qwen3-8b] [--transport path --transport parts --transport shared_memory]

Random weights of a published shape; the service holds them in FP8 with an FP8 KV cache, in an engine with the arguments
of ``benchmarks.rollout.throughput``'s documented run, and ``--concurrent`` rollouts run through its HTTP all the while.
Transports:

- ``path``: the service reads a folder of BF16 files and quantizes; the last byte was there before it was told;
- ``parts``: BF16 over HTTP, quantized by the service, parts as they come;
- ``trainer``: codes and scales over HTTP, quantized by this process;
- ``shared_memory``: BF16 through memory that this process and the ingest share, quantized by the service;
- ``cuda_ipc``: likewise through memory of this process's GPU;
- ``delta``: what has changed in codes, scales and BF16 tensors over HTTP, quantized and compared by this process. Of 2%
  of the BF16 weights the last bit changes between two versions (``benchmarks.update.delta`` measures steps of an
  optimizer); for all other transports every weight does. The first push, of everything, is not measured;

The rollouts are another process's. This one is the trainer: it has its weights on a GPU, the engine's own if it sees no
other, else the one of which least is taken, and changes all of them for each version; but the folder of ``path`` stays
what it is. Between two versions it rests for ``--pause-s``, where a trainer computes for longer: what client, ingest
and replicas do after a version and before the next is no part of a push then. With the log in memory the first versions
after a start are slower, as each process registers the memory of three versions with CUDA: these pushes, ``--warmups``
of them by the first transport, are ``first_push_s``; of others, one, where the first takes memory.

``all_live_s`` is from the last part's acknowledgement, or for ``path`` from the call, until the commit is
answered: what is left is converted and synced to disk, and each replica has checked, staged and loaded it. ``push_s``
is the whole push. ``stages`` are its seconds: ``receive``, ``quantize``, ``store`` and ``finish`` as ``UploadTimings``
has them (they overlap), ``stage``, ``closed`` and ``load`` as the slowest replica tells them. All hold what the
ingest's disk takes: ``--folder`` is memory if it is a tmpfs. Adds each case, once measured, to
benchmarks/results/<machine>/update_live.json, in place of earlier ones of the same model, transport, staging and
replicas.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

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
from benchmarks.update.busy import rollouts
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.weights import UploadTimings
from rollout_service.store.mapped_files import is_in_memory

RESULT = "update_live"
SAME = ("model", "door", "layers", "scales_policy", "staging", "replicas", "gpus", "ingest_beside")
"""Fields in which two cases agree that measured the same."""
LEAST_REPEATS = 3
DELTA_SHARE = 0.02
"""Of BF16 weights, that differ between two versions."""


class Transport(StrEnum):
    """How a trainer sends a version."""

    PATH = "path"
    PARTS = "parts"
    TRAINER = "trainer"
    SHARED_MEMORY = "shared_memory"
    CUDA_IPC = "cuda_ipc"
    DELTA = "delta"


class Beside(StrEnum):
    """Whose GPU the ingest shares, where trainer and engine have one each."""

    ENGINE = "engine"
    TRAINER = "trainer"


class PushOptions(Options):
    """What is pushed."""

    transport: tuple[Transport, ...] = tuple(Transport)
    """May be repeated."""
    repeats: int = 5
    """Versions by each transport."""
    seconds: float = 20.0
    """A transport that has taken so long has three versions, if fewer than ``repeats``."""
    ingest_beside: Beside = Beside.ENGINE
    """Whose GPU the ingest shares, where trainer and engine have one each."""
    warmups: int = 3
    """Versions before those, by the first transport."""
    pause_s: float = 1.0
    """Seconds between a version that is live and the push of the next."""
    gpu_share: float = ENGINES_SHARE
    """Of the GPU's memory, the engine's: the trainer's weights need room, too."""
    concurrent: int = 64
    """Rollouts that run meanwhile."""


FIRST_IS_SLOWER = (Transport.DELTA, Transport.SHARED_MEMORY, Transport.CUDA_IPC)
"""They take memory, or send everything: their first push is not measured."""


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
    """``kv_cache.scales_policy``."""
    log: str = "disk"
    """Where versions are served from: disk or memory."""
    staging: str = "auto"
    """``engine.staging``."""
    replicas: int = 1
    gpus: int = 1
    """Of the host. With one, trainer, ingest and engine share it."""
    ingest_beside: str = "engine"
    """Whose GPU the ingest shares. With one, everybody's."""
    pause_s: float = 0.0
    """Before each push."""
    sent_gbytes: float = 0.0
    """What the trainer's files or parts hold; of a delta, its changes. 0: not kept."""
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
    stages: list[dict[str, float]] = field(default_factory=list)
    """Of each version of ``push_s``."""

    def add(self, uploaded: UploadTimings | None, updates: Sequence[UpdateTimings]) -> None:
        """Of one version, and of each replica's update to it."""
        self.stage_s += [timings.stage_s for timings in updates]
        self.closed_s += [timings.closed_s for timings in updates]
        self.load_s += [timings.load_s for timings in updates]
        received = {} if uploaded is None else uploaded.model_dump()
        slowest = {name: max(getattr(timings, name) for timings in updates) for name in UpdateTimings.model_fields}
        self.stages.append(
            {name.removesuffix("_s"): seconds for name, seconds in (received | slowest).items() if name.endswith("_s")}
        )


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
        if (count := torch.cuda.device_count()) > 1:  # of two, the one that no engine has, whichever Ray gave it
            torch.cuda.set_device(min(range(count), key=torch.cuda.device_memory_used))
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
        trainer.step(DELTA_SHARE if case.door == Transport.DELTA else 1.0)
    await asyncio.sleep(case.pause_s)
    last = LastByte()
    started = time.perf_counter()
    if case.door == Transport.PATH:
        last.at, last.nbytes = started, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        status = await client.push_path(version, folder)
    else:
        assert trainer is not None
        how: dict[str, Any]
        if case.door in (Transport.DELTA, Transport.SHARED_MEMORY, Transport.CUDA_IPC):
            how = {"transport": str(case.door)}
        else:
            how = {"transport": "http", "quantize": "trainer" if case.door == Transport.TRAINER else "service"}
        status = await client.push_weights(version, trainer.tensors, progress=last.progress, **how)
    ended = time.perf_counter()
    if last.at is None or status.state != "live":
        raise RuntimeError(f"version {version} is {status.state}, and its last byte came at {last.at}")
    sent_bytes = (status.uploaded_bytes or 0) if case.door == Transport.DELTA else last.nbytes
    case.sent_gbytes, case.gbytes = sent_bytes / 1e9, (status.total_bytes or 0) / 1e9
    case.push_s.append(ended - started)
    case.all_live_s.append(ended - last.at)
    replicas = (await client.fleet()).replicas
    if silent := [replica.replica_id for replica in replicas if replica.update is None]:
        raise RuntimeError(f"replicas {silent} have told no timings")
    case.add(status.timings, [replica.update for replica in replicas if replica.update is not None])


@dataclass(frozen=True)
class Updates:
    """What is pushed, by which transports, and what else goes on."""

    cases: list[Case]
    folder: Path
    """The BF16 files, and no others."""
    repeats: int
    concurrent: int
    warmups: int
    seconds: float

    async def measure(self, url: str) -> None:
        """All cases, with a running service whose version 0 has taught it its load plan. Each is kept once done."""
        version = 0
        trainer = None if all(case.door == Transport.PATH for case in self.cases) else Trainer(self.folder)
        failed: list[str] = []
        with rollouts(url, self.concurrent):
            async with RolloutClient(url) as client:
                for number, case in enumerate(self.cases):
                    try:
                        version = await self._case(client, case, version, number == 0, trainer)
                    except RolloutServiceError as error:  # the other cases may be measured all the same
                        print(f"{case.door}: {error}", flush=True)
                        failed.append(case.door)
                        version = max(status.version for status in await client.weights())
                    else:
                        results.add(RESULT, [asdict(case) | {"concurrent": self.concurrent}], SAME)
        if failed:
            raise RuntimeError(f"not measured: {', '.join(failed)}")

    async def _case(
        self, client: RolloutClient, case: Case, version: int, is_first: bool, trainer: Trainer | None
    ) -> int:
        """Its pushes, after ``version``. Returns the last one's."""
        for _ in range(self.warmups if is_first else int(case.door in FIRST_IS_SLOWER)):
            first = replace(
                case, push_s=case.first_push_s, all_live_s=[], stage_s=[], closed_s=[], load_s=[], stages=[]
            )
            await push(client, version := version + 1, self.folder, first, trainer)
        began = time.perf_counter()
        for done in range(self.repeats):
            if done >= LEAST_REPEATS and time.perf_counter() - began > self.seconds:
                break
            await push(client, version := version + 1, self.folder, case, trainer)
        return version


def main(model: ModelOptions, pushes: PushOptions, engine: LiveEngine) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/update_live.json."""
    log = "memory" if is_in_memory(model.folder) else "disk"
    cases = [
        Case(
            model.model,
            transport,
            model.layers,
            log=log,
            staging=engine.staging,
            gpus=max(1, torch.cuda.device_count()),
            ingest_beside=str(pushes.ingest_beside),
            pause_s=pushes.pause_s,
        )
        for transport in pushes.transport
    ]
    work = WorkOptions()  # not done: it makes the engine that benchmarks.rollout.throughput has
    with tempfile.TemporaryDirectory(dir=model.folder) as temporary:
        path = write_config(model.model, Path(temporary) / model.model, model.layers)
        write_weights(path)
        settings = settings_of(Mode.FP8KV, path, path.parent, fitting(work) | engine.settings(work.sequences))
        settings["engine"]["gpu_memory_utilization"] = pushes.gpu_share
        if pushes.ingest_beside is Beside.TRAINER:
            settings["scaling"]["num_gpus"] = 1.0  # so Ray puts the ingest on the GPU that no engine has
        with serving(settings, path.parent, model.verbose) as service:
            if model.free:
                remove_weights(path)
            updates = Updates(cases, path, pushes.repeats, pushes.concurrent, pushes.warmups, pushes.seconds)
            asyncio.run(updates.measure(service.url))


if __name__ == "__main__":
    run(main)
