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
benchmarks/results/<machine>/update_live.json, in place of earlier ones of the same model, transport and staging.
"""

import asyncio
import time
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import ENGINES_SHARE, EngineOptions, ModelOptions, fitting, serving_random_weights
from benchmarks.common.random_weights import gaussian
from benchmarks.common.results import Json
from benchmarks.common.work import WorkOptions
from benchmarks.update.busy import rollouts
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.mapped_files import is_in_memory

RESULT = "update_live"
SAME = ("model", "door", "layers", "staging", "gpus", "ingest_beside")
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


FIRST_IS_SLOWER = (Transport.DELTA, Transport.SHARED_MEMORY, Transport.CUDA_IPC)
"""They take memory, or send everything: their first push is not measured."""


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


class LiveEngine(EngineOptions):
    """The engine."""

    block_size: int | None = 64
    """Tokens of a page of the KV cache."""
    batched_tokens: int | None = 8192
    """Tokens of a step."""
    graph_step: int | None = 16
    """CUDA graphs for multiples of it."""

    def fitting(self) -> dict[str, Any]:
        """Return the settings of the engine that ``benchmarks.rollout.throughput`` measures."""
        work = WorkOptions()
        return fitting(work) | self.settings(work.sequences)


class Trainer:
    """A model's BF16 weights on a GPU, if there is one, and pushes of them."""

    def __init__(self, client: RolloutClient, folder: Path, pause_s: float) -> None:
        """``folder``: has the model's files."""
        if (count := torch.cuda.device_count()) > 1:  # of two, the one that no engine has, whichever Ray gave it
            torch.cuda.set_device(min(range(count), key=torch.cuda.device_memory_used))
        self._client, self._folder, self._pause_s, self._version = client, folder, pause_s, 0

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """The weights; made when a transport first needs them, since ``path`` does without."""
        return {name: gaussian(shape) for name, shape in ServedModel.load(self._folder).shapes.items()}

    async def skip_failed_version(self) -> None:
        """Go on after the newest version that the service knows."""
        self._version = max(status.version for status in await self._client.weights())

    def step(self, share: float) -> None:
        """Change that share of the weights, by the last bit; with 1, change all of them entirely."""
        for tensor in self._tensors.values():
            if share == 1:
                tensor.neg_()
            else:
                tensor.view(torch.int16).bitwise_xor_(torch.rand(tensor.shape, device=tensor.device) < share)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    async def push(self, transport: Transport) -> Json:
        """Push one version until all replicas serve it; return its seconds and sizes.

        Raises RuntimeError if the version is not live, or a replica has not reported its update.
        """
        if transport != Transport.PATH:
            self.step(DELTA_SHARE if transport == Transport.DELTA else 1.0)
        await asyncio.sleep(self._pause_s)
        self._version += 1
        sent_bytes = sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))
        last_byte_at = started = time.perf_counter()

        def progress(done: int, total: int) -> None:
            nonlocal last_byte_at, sent_bytes
            if done == total:
                last_byte_at, sent_bytes = time.perf_counter(), total

        if transport == Transport.PATH:
            status = await self._client.push_path(self._version, self._folder)
        else:
            how: dict[str, Any] = {"transport": str(transport)}
            if transport in (Transport.PARTS, Transport.TRAINER):
                how = {"transport": "http", "quantize": "trainer" if transport == Transport.TRAINER else "service"}
            status = await self._client.push_weights(self._version, self._tensors, progress=progress, **how)
        ended = time.perf_counter()
        if status.state != "live":
            raise RuntimeError(f"version {status.version} is {status.state}")
        if transport == Transport.DELTA:
            sent_bytes = status.uploaded_bytes or 0
        return {
            "sent_gbytes": sent_bytes / 1e9,
            "gbytes": (status.total_bytes or 0) / 1e9,
            "push_s": ended - started,
            "all_live_s": ended - last_byte_at,
            "stages": await self._stages(status),
        }

    async def _stages(self, status: WeightStatus) -> dict[str, float]:
        replicas = (await self._client.fleet()).replicas
        updates = [replica.update for replica in replicas if replica.update is not None]
        if len(updates) < len(replicas):
            raise RuntimeError("a replica has reported no timings")
        uploaded = {} if status.timings is None else status.timings.model_dump()
        slowest = {name: max(getattr(update, name) for update in updates) for name in UpdateTimings.model_fields}
        return {name.removesuffix("_s"): value for name, value in (uploaded | slowest).items() if name.endswith("_s")}


async def measure_transport(trainer: Trainer, transport: Transport, pushes: PushOptions) -> Json:
    """Push versions by one transport, some of them first that are reported apart."""
    is_first = transport == pushes.transport[0]
    first = [
        await trainer.push(transport) for _ in range(pushes.warmups if is_first else int(transport in FIRST_IS_SLOWER))
    ]
    began, found = time.perf_counter(), list[Json]()
    while len(found) < pushes.repeats:
        if len(found) >= LEAST_REPEATS and time.perf_counter() - began > pushes.seconds:
            break
        found.append(await trainer.push(transport))
    stages = [each["stages"] for each in found]
    return {
        "sent_gbytes": found[-1]["sent_gbytes"],
        "gbytes": found[-1]["gbytes"],
        "first_push_s": [each["push_s"] for each in first],
        "push_s": [each["push_s"] for each in found],
        "all_live_s": [each["all_live_s"] for each in found],
        **{f"{name}_s": [each[name] for each in stages] for name in ("stage", "closed", "load")},
        "stages": stages,
    }


async def measure(url: str, folder: Path, common: Json, pushes: PushOptions) -> None:
    """Measure all transports while rollouts run, and add each to the result. Raises RuntimeError if one fails."""
    failed: list[str] = []
    with rollouts(url, pushes.concurrent):
        async with RolloutClient(url) as client:
            trainer = Trainer(client, folder, pushes.pause_s)
            for transport in pushes.transport:
                try:
                    found = await measure_transport(trainer, transport, pushes)
                except RolloutServiceError as error:  # the others may be measured all the same
                    print(f"{transport}: {error}", flush=True)
                    failed.append(transport)
                    await trainer.skip_failed_version()
                else:
                    results.add(RESULT, [common | {"door": str(transport)} | found], SAME)
    if failed:
        raise RuntimeError(f"not measured: {', '.join(failed)}")


def main(model: ModelOptions, pushes: PushOptions, engine: LiveEngine) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/update_live.json."""
    common: Json = {
        "model": str(model.model),
        "layers": model.layers,
        "log": "memory" if is_in_memory(model.folder) else "disk",
        "staging": engine.staging,
        "gpus": max(1, torch.cuda.device_count()),
        "ingest_beside": str(pushes.ingest_beside),
        "pause_s": pushes.pause_s,
        "concurrent": pushes.concurrent,
    }
    settings = engine.fitting() | {"gpu_memory_utilization": pushes.gpu_share}
    # a whole GPU for the engine: Ray then puts the ingest on the other one
    scaling = {"num_gpus": 1.0} if pushes.ingest_beside is Beside.TRAINER else {}
    with serving_random_weights(model, settings, scaling=scaling) as (service, path):
        asyncio.run(measure(service.url, path, common, pushes))


if __name__ == "__main__":
    run(main)
