"""A trainer that broadcasts by vLLM's weight-transfer routes, or the ingest that receives it, killed half way.

    python -m benchmarks.faults.broadcasts URL MODEL VERSION WHOLE|HALF

is the trainer: vLLM's trainer engine and HTTP client, with gloo in place of NCCL. With HALF it stands still after half
of the bytes until its input ends, so the moment lasts as long as it is needed. A case's seconds until it recovered hold
the starts of two trainers, which import vLLM beside the engines.
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

HALF_WAY = "half way:"  # the trainer's word; then the bytes handed over, and those of the version
STEP_S = 120.0  # in which each step is to be done: a trainer imports vLLM on busy cores


def broadcast_cases() -> Iterator[Case]:
    """Yield the death of either end of a broadcast."""
    for victim in ("trainer", "ingest"):
        yield Case(f"kill {victim}, in the middle of a broadcast", partial(in_a_broadcast, victim))


async def in_a_broadcast(victim: str, ground: Ground) -> None:
    """Drop the version; its number is free for a push in parts, and another trainer's broadcast is served."""
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
    async with _trainer(ground, version + 1, "WHOLE") as trainer:
        _, errors = await asyncio.wait_for(trainer.communicate(), STEP_S)
        assert trainer.returncode == 0, errors.decode()[-2000:]
    ground.committed = version + 1
    status = await ground.client.weights(version + 1)
    assert status.state == "live", status
    ground.note(f"version {version} then came in parts, and version {version + 1} by a new trainer's broadcast")


@asynccontextmanager
async def _trainer(ground: Ground, version: int, part: str) -> AsyncIterator[Process]:
    """Yield the trainer's process, which does not outlive the block."""
    arguments = ground.service.url, str(ground.service.config.model.path), str(version), part
    command = sys.executable, "-m", "benchmarks.faults.broadcasts", *arguments
    trainer = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        yield trainer
    finally:
        if trainer.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                trainer.kill()
            await trainer.wait()


async def _half_way(trainer: Process) -> str:
    """Wait until the trainer stands still; return which bytes it has handed over."""
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
    """Return True if something was written: a file that was only laid out is zero after its header."""
    for path in staged.glob("*.safetensors"):
        data = path.read_bytes()
        tensors = data[8 + int.from_bytes(data[:8], "little") :]
        if tensors.count(0) < len(tensors):
            return True
    return False


async def _is_dropped(ground: Ground, version: int, staged: Path) -> bool:
    """Return True if nobody waits for more of it, there is no such version, and its files are gone."""
    if (await _transfer(ground)).state != "no group" or staged.exists():
        return False
    with refused(NotFound):
        await ground.client.weights(version)
    return True


async def _transfer(ground: Ground) -> TransferStatus:
    response = await ground.send("GET", "/server_info", params={"config_format": "json"})
    return TransferStatus.model_validate(response.json()["weight_transfer"])


def train(url: str, model: Path, version: int, stops: bool) -> None:
    """Push one version by vLLM's trainer engine. Raises what that raises."""
    import pytest
    import torch
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tests.support.gloo_trainer import Tensors, trainer_info, use_gloo
    from tests.support.telltale import canary_weights

    class NamingClient(HTTPVLLMWeightSyncClient):
        """vLLM's trainer engine names no version; this client does."""

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            super().finish_weight_update(weight_version or str(version))

    class StopsHalfWay(Tensors):
        """Weights of which the second half does not come before this process's input has ended."""

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            total, handed_over, stopped = sum(tensor.nbytes for tensor in self.weights.values()), 0, False
            for name, tensor in self.weights.items():
                if not stopped and 2 * handed_over >= total:
                    print(HALF_WAY, handed_over, total, flush=True)
                    sys.stdin.read()
                    stopped = True
                yield name, tensor
                handed_over += tensor.nbytes

    source = StopsHalfWay() if stops else Tensors()
    source.weights = canary_weights(model, version)
    with pytest.MonkeyPatch.context() as patch:
        use_gloo(patch)
        client = NamingClient(url)
        engine = WeightTransferTrainerFactory.trainer_init(trainer_info(), client=client, source=source)
        engine.send_weights()
        client.shutdown_weight_transfer_engine()
        engine.shutdown()


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), stops=sys.argv[4] == "HALF")
