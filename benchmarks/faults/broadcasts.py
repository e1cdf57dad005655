"""A trainer that broadcasts by vLLM's weight-transfer routes, or the ingest that receives it, killed half way.

The trainer stands still half way, in a process of its own (``broadcasting_trainer.py``), so the moment lasts as long as
it is needed: it is killed when the ingest has written tensors of the version and waits for the others. A case's seconds
until it recovered hold the starts of two trainers, which import vLLM beside the engines.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from benchmarks.common.paths import PROJECT
from benchmarks.faults.ground import Case, Ground, until
from benchmarks.faults.inputs import refused
from benchmarks.faults.kills import push_until_committed
from rollout_service.errors import NotFound
from rollout_service.protocol.weight_transfer import TransferStatus
from rollout_service.store.log import WeightLog

HALF_WAY = "half way:"
"""The trainer's word; then the bytes handed over, and those of the version."""
STEP_S = 120.0
"""In which each step is to be done: a trainer imports vLLM on busy cores."""


def broadcast_cases() -> Iterator[Case]:
    """Either end of a broadcast."""
    for victim in ("trainer", "ingest"):
        yield Case(f"kill {victim}, in the middle of a broadcast", partial(in_a_broadcast, victim))


async def in_a_broadcast(victim: str, ground: Ground) -> None:
    """The version is dropped; its number is free for a push in parts, and another trainer's broadcast is served.

    Raises AssertionError or TimeoutError if not.
    """
    version = ground.committed + 1
    staged = WeightLog(ground.log).staging(version)
    async with _trainer(ground, version, "HALF") as trainer:
        told = await _half_way(trainer)
        await until(lambda: _is_receiving(ground, staged), "the version's tensors are coming", STEP_S)
        status = await ground.client.weights(version)
        assert status.state == "staged", status
        if victim == "trainer":
            trainer.kill()
        else:
            await ground.kill(victim)
        ground.note(f"{told} of version {version} had been handed over, some were written, and it was {status.state}")
        await until(lambda: _is_dropped(ground, version, staged), "the version is dropped", STEP_S)
        # with an empty input its input ends, and one that lives goes on; with none it would stay open
        _, errors = await asyncio.wait_for(trainer.communicate(b""), STEP_S)
        assert trainer.returncode != 0, "the trainer believes that its version was taken"
        if victim != "trainer":
            ground.note(f"its trainer was told: {errors.decode().strip().splitlines()[-1]}")
    await push_until_committed(ground, version)
    await _broadcast(ground, version + 1)
    ground.note(f"version {version} then came in parts, and version {version + 1} by a new trainer's broadcast")


async def _broadcast(ground: Ground, version: int) -> None:
    async with _trainer(ground, version, "WHOLE") as trainer:
        _, errors = await asyncio.wait_for(trainer.communicate(), STEP_S)
        assert trainer.returncode == 0, errors.decode()[-2000:]
    ground.committed = version
    status = await ground.client.weights(version)
    assert status.state == "live", status


@asynccontextmanager
async def _trainer(ground: Ground, version: int, part: str) -> AsyncIterator[Process]:
    """Its process, which does not outlive the block."""
    arguments = ground.service.url, str(ground.service.config.model.path), str(version), part
    command = sys.executable, "-m", "benchmarks.faults.broadcasting_trainer", *arguments
    trainer = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        yield trainer
    finally:
        if trainer.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                trainer.kill()
            await trainer.wait()


async def _half_way(trainer: Process) -> str:
    """Wait until it stands still; returns which bytes it has handed over. Raises AssertionError if it ends before."""
    assert trainer.stdout is not None
    async with asyncio.timeout(STEP_S):
        async for line in trainer.stdout:  # vLLM logs there, too
            if line.startswith(HALF_WAY.encode()):
                done_bytes, total_bytes = line.removeprefix(HALF_WAY.encode()).split()
                return f"{int(done_bytes)} of {int(total_bytes)} bytes"
    _, errors = await trainer.communicate()
    raise AssertionError(f"the trainer ended before it was half way: {errors.decode()[-2000:]}")


async def _is_receiving(ground: Ground, staged: Path) -> bool:
    return (await _transfer(ground)).state == "receiving" and await asyncio.to_thread(_has_tensors, staged)


def _has_tensors(staged: Path) -> bool:
    """Whether something was written: a file that was only laid out is zero after its header."""
    for path in staged.glob("*.safetensors"):
        data = path.read_bytes()
        tensors = data[8 + int.from_bytes(data[:8], "little") :]
        if tensors.count(0) < len(tensors):
            return True
    return False


async def _is_dropped(ground: Ground, version: int, staged: Path) -> bool:
    """Whether nobody waits for more of it, there is no such version, and its files are gone."""
    if (await _transfer(ground)).state != "no group" or staged.exists():
        return False
    with refused(NotFound):
        await ground.client.weights(version)
    return True


async def _transfer(ground: Ground) -> TransferStatus:
    response = await ground.send("GET", "/server_info", params={"config_format": "json"})
    return TransferStatus.model_validate(response.json()["weight_transfer"])
