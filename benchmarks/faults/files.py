"""The log's files damaged behind the service's back, just before a replica must read them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.faults.ground import Case, Ground

DAMAGED_S = 15.0
"""Between the kill and the version that heals: the successor reads the damaged one meanwhile."""


def file_cases() -> Iterator[Case]:
    """A bit and a length."""
    yield Case("a flipped byte in a file of the log", damaged(flip))
    yield Case("a truncated file of the log", damaged(truncate))


def damaged(damage: Callable[[Path], None]) -> Callable[[Ground], Awaitable[None]]:
    """Damage the newest version and kill an engine: its successor must not serve it. A newer version heals."""

    async def fault(ground: Ground) -> None:
        known = await ground.replica_ids()
        damage(max((ground.log / str(ground.committed)).glob("*.safetensors")))
        await ground.kill("engine core")
        await asyncio.sleep(DAMAGED_S)
        if newcomers := await ground.replica_ids() - known:
            ready = [r for r in (await ground.client.fleet()).replicas if r.replica_id in newcomers]
            ground.note(f"the successor said {[(r.state, r.version) for r in ready]}")
            if any(r.state == "ready" for r in ready):
                raise AssertionError("a replica is ready at a version whose bytes are damaged")
        await ground.push(ground.committed + 1, wait="none")

    return fault


def flip(path: Path) -> None:
    """One bit in the middle."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    """The last kilobyte is gone."""
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1024)
