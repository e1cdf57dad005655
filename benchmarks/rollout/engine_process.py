"""A bare engine in a process of its own, which runs a turn of work, or records one, when it is told to.

Several start at once: each has its own environment, event loop and vLLM, and nothing of one waits for another.
"""

import asyncio
import multiprocessing
import signal
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.common.engine import bare_engine
from benchmarks.common.gpu_service import Settings
from benchmarks.common.results import Json
from benchmarks.group_attention import Asked
from benchmarks.kernels.decode_profile import decoding, profiler_into, recorded
from benchmarks.rollout.machine_watch import gpu_watch
from benchmarks.rollout.turns import SHORT, Sample, sampled
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.fleet.autoscaling import KV_USAGE

_STOP_S = 30.0
"""An engine that is told to end gets so long for it."""


@dataclass(frozen=True)
class Started:
    """The engine takes work."""

    seconds: float
    kv_tokens: int


@dataclass(frozen=True)
class Turn:
    """Run the work, a short run first; answered with a ``Sample``."""

    asked: Asked
    mark: str
    """See ``turns.sampled``."""
    warm_up: bool = False
    """An eighth of the tokens are enough."""


@dataclass(frozen=True)
class Recording:
    """Record decode steps of the work; answered with ``Recorded``."""

    asked: Asked
    steps: int


@dataclass(frozen=True)
class Recorded:
    """What the profiler saw."""

    kv_tokens: float
    """In the KV cache meanwhile, each once however many sequences have it in common."""
    profile: Json
    """See ``decode_profile.summary``."""


@dataclass(frozen=True)
class NotRecorded:
    """The engine goes on, but there is no profile."""

    why: str


class EngineProcess:
    """From this process's side. Raises EngineGone wherever the other has ended, which says on stderr why."""

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        """``settings``: of the service. ``folder``: for traces."""
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, others = context.Pipe()
        self._process = context.Process(target=serve, args=(others, settings, folder), name=name)
        self._process.start()
        self._waits = False
        """For orders; else it starts, or has one."""
        others.close()  # or the end of the other process would not be seen

    def started(self, until: float) -> Started:
        """Wait for it. Raises TimeoutError after ``until``, by ``time.monotonic``."""
        answer = self._answer(until)
        assert isinstance(answer, Started)
        return answer

    def turn(self, turn: Turn, until: float) -> Sample:
        """Have it run. Raises TimeoutError after ``until``."""
        answer = self._ordered(turn, until)
        assert isinstance(answer, Sample)
        return answer

    def record(self, recording: Recording, until: float) -> Recorded | NotRecorded:
        """Have it recorded. Raises TimeoutError after ``until``."""
        answer = self._ordered(recording, until)
        assert isinstance(answer, Recorded | NotRecorded)
        return answer

    def _ordered(self, order: Turn | Recording, until: float) -> object:
        self._waits = False
        try:
            self._connection.send(order)
        except ConnectionError:
            raise self._gone() from None
        return self._answer(until)

    def _answer(self, until: float) -> object:
        try:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"{self.name}: no answer in time")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._gone() from None
        self._waits = True
        return answer

    def _gone(self) -> "EngineGone":
        return EngineGone(f"{self.name}: the engine's process has ended, and said why on stderr")

    def stop(self) -> None:
        """End it: in order if it waits for orders, else by SIGTERM, and after some time by SIGKILL."""
        self.end()
        if self._waits:
            self._process.join(_STOP_S)
        self._process.terminate()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def end(self) -> None:
        """Have it end in order, and do not wait for it; nothing can be asked of it any more."""
        self._connection.close()


def stop_all(engines: Iterable[EngineProcess]) -> None:
    """End them at the same time."""
    engines = list(engines)
    for engine in engines:
        engine.end()
    for engine in engines:
        engine.stop()


class EngineGone(RuntimeError):
    """The other process has ended."""


def serve(connection: Connection, settings: Settings, folder: Path) -> None:
    """The other process: until it is told to end, or nobody is there any more."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the engine is shut down on the way out
    asyncio.run(_serve(connection, ServiceConfig.model_validate(settings), folder))


async def _serve(connection: Connection, config: ServiceConfig, folder: Path) -> None:
    began = time.monotonic()
    async with bare_engine(config, arguments={"profiler_config": profiler_into(folder)}) as engine:
        await engine.label(0)  # the dummy weights' label is no version
        connection.send(Started(time.monotonic() - began, engine.kv_cache_tokens))
        block = config.engine.block_size
        assert block is not None  # the benchmark gives one
        while True:
            try:
                order = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            if isinstance(order, Turn):
                connection.send(await _ran(engine, order))
            else:
                connection.send(await _recorded(engine, order, block, folder))


async def _ran(engine: EngineAdapter, turn: Turn) -> Sample:
    work = turn.asked.work()
    if turn.warm_up:
        work = replace(work, out=max(1, work.out // SHORT))
    with gpu_watch() as watch:
        return await sampled(
            work, lambda prompt, how: engine.generate(uuid.uuid4().hex, tuple(prompt), how), turn.mark, watch
        )


async def _recorded(engine: EngineAdapter, recording: Recording, block: int, folder: Path) -> Recorded | NotRecorded:
    asked = recording.asked
    # when each has an eighth of its tokens, all prompts have long been read
    wanted = asked.kv_tokens - asked.sequences * (asked.output_tokens - asked.output_tokens // SHORT)
    async with decoding(engine, asked.work()) as rollouts:
        while (held := _held(engine, asked, block)) < wanted:
            if any(rollout.done() for rollout in rollouts):
                return NotRecorded(f"{asked}: a sequence was over before {wanted} tokens were in the KV cache")
            await asyncio.sleep(0.02)
        try:
            profile = await recorded(engine, recording.steps, folder)
        except ValueError as error:
            return NotRecorded(str(error))
    return Recorded(held + asked.sequences * recording.steps / 2, profile)


def _held(engine: EngineAdapter, asked: Asked, block: int) -> float:
    """Tokens in the KV cache: of each sequence's last page, half."""
    used = engine.scheduler.load(asked.sequences)[KV_USAGE] * engine.kv_cache_tokens
    return used - asked.sequences * block / 2
