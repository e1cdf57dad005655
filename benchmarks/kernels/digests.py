"""How fast a GPU hashes chunks of a manifest (xxh3-128, ``rollout_service.quant.digests``), beside a copy of them.

    python -m benchmarks.kernels.digests

``chunks`` of 1 MiB in one launch, whose addresses are multiples of 8 (``aligned``) or not. The copy is of the same
bytes within the GPU, in the same run; it reads and writes them, a hash reads.
"""

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from rollout_service.quant.digests import Hashing, Run
from rollout_service.store.manifest import CHUNK_BYTES

RESULT = "kernels_digests"


class DigestOptions(Options):
    """What is hashed."""

    chunks: tuple[int, ...] = (32, 64, 128, 1024, 9000)
    """In one launch; may be repeated."""
    repeats: int = 10
    """Launches that are timed together."""


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Of one, on the GPU, after one that is not counted."""
    work()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / repeats


def main(options: DigestOptions) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/kernels_digests.json."""
    device = torch.device("cuda", 0)
    cases = []
    for chunks in options.chunks:
        nbytes = chunks * CHUNK_BYTES
        memory = torch.randint(0, 256, (nbytes + 8,), dtype=torch.uint8, device=device)
        other = torch.empty_like(memory)
        copied = seconds_of(lambda other=other, memory=memory: other.copy_(memory), options.repeats)  # type: ignore[misc]
        for aligned in (True, False):
            start = memory.data_ptr() + (0 if aligned else 4)
            runs = [Run(start + number * CHUNK_BYTES, CHUNK_BYTES) for number in range(chunks)]
            hashing = Hashing([runs], device)
            hashed = seconds_of(lambda hashing=hashing: hashing.queue(0), options.repeats)  # type: ignore[misc]
            cases.append(
                {
                    "chunks": chunks,
                    "aligned": aligned,
                    "gb_per_s": nbytes / hashed / 1e9,
                    "copy_gb_per_s": nbytes / copied / 1e9,
                }
            )
        del memory, other
    path = results.write(RESULT, {"cases": cases})
    table = Table(title=f"xxh3-128 of chunks of 1 MiB, on {results.machine()}")
    for column in ("chunks", "aligned", "GB/s", "a copy"):
        table.add_column(column, justify="right")
    for case in cases:
        table.add_row(
            str(case["chunks"]), str(case["aligned"]), f"{case['gb_per_s']:.0f}", f"{case['copy_gb_per_s']:.0f}"
        )
    console = Console()
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    run(main)
