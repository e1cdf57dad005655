"""The log's files damaged behind the service's back, just before a replica must read them."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.faults.ground import Ground
from benchmarks.faults.kills import kill_one

Fault = Callable[[Ground], Awaitable[None]]


def file_cases() -> Iterator[tuple[str, bool, Fault]]:
    """Name, whether there is load, and what happens."""
    yield "a flipped byte in a file of the log", True, damaged(flip)
    yield "a truncated file of the log", True, damaged(truncate)


def damaged(damage: Callable[[Path], None]) -> Fault:
    """Damage the newest version, then kill an engine: its successor must not serve it. A newer version heals."""

    async def fault(ground: Ground) -> None:
        files = sorted(ground.log.glob(f"*{ground.committed}/*.safetensors"))
        damage(files[-1])
        kill_one("engine core")
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
