"""Compilation of DeepGEMM's kernels by several processes at once.

DeepGEMM runs nvcc for some seconds at the first product that needs a kernel, and keeps the kernel in
``DG_JIT_CACHE_DIR``. vLLM's warm-up compiles one kernel after another. Here processes share the same products: each
takes the next few sizes from one queue, a file, until none is left. Meanwhile vLLM compiles the model's graph.
"""

import fcntl
import hashlib
import logging
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import vllm
from vllm import envs

from rollout_service.compat.vllm_deep_gemm import deep_gemm_sizes, fp8_gemm_nt
from rollout_service.quant.blockwise import BLOCK

logger = logging.getLogger(__name__)

PROCESSES = 8
"""Maximum number of processes."""
PROCESS_BYTES = 2 << 30
"""GPU memory of a process. All take at most a quarter of what is free: a trainer may use the same GPU, and vLLM runs
the model meanwhile."""
LIMIT_S = 300.0
"""Time in seconds after which the processes are stopped. vLLM's warm-up compiles the remaining kernels."""

CHUNK = 16
"""Number of sizes that a process takes at once. Neighbours often need the same kernel."""

Size = tuple[int, int, int]
"""A product's number of tokens m, and its weight's rows n and columns k."""
_SIZE = struct.Struct("<3q")


def compile_kernels(model: torch.nn.Module, tokens: int, device: torch.device) -> None:
    """Start to compile the kernels of the model's linear layers for steps of up to ``tokens`` tokens.

    The model's first forward pass waits for the end. Does nothing if DeepGEMM computes no layer, if
    ``VLLM_DEEP_GEMM_WARMUP`` is ``skip``, or if they were compiled on this host before. Logs a warning if processes
    fail. Call it before vLLM measures free memory.
    """
    if device.index or envs.VLLM_DEEP_GEMM_WARMUP == "skip":  # an engine's first worker compiles for all
        return
    sizes = deep_gemm_sizes(model, tokens)
    free, _ = torch.cuda.mem_get_info(device)
    processes = min(PROCESSES, len(os.sched_getaffinity(0)), free // (4 * PROCESS_BYTES))
    if sizes and processes:
        made_for = (vllm.__version__, torch.version.cuda, torch.cuda.get_device_name(device), sizes)
        digest = hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]
        marker = _cache_folder() / f"rollout-service-{digest}"
        run_beside_first_forward(model, lambda: compile_once(sizes, processes, marker))


def run_beside_first_forward(model: torch.nn.Module, work: Callable[[], None]) -> None:
    """Run ``work`` in a thread, and let the model's first forward pass wait for its end.

    The first pass compiles the model's graph. It ends before vLLM measures free memory: the memory of processes that
    ``work`` starts is free again by then.
    """
    # a daemon: an engine that fails meanwhile ends at once, and the processes end with it
    thread = threading.Thread(target=work, name="compile-kernels", daemon=True)
    thread.start()

    def wait(*_: object) -> None:
        handle.remove()
        thread.join()

    handle = model.register_forward_hook(wait)


def compile_once(
    sizes: list[Size],
    processes: int,
    marker: Path,
    command: Sequence[str] = (sys.executable, "-m", __name__),
    limit_s: float = LIMIT_S,
) -> None:
    """Run ``command`` in so many processes, unless ``marker`` says that they have succeeded.

    The processes take sizes from their standard input (``taken``); their last argument is the id of this process.
    Replicas of one host wait for each other.
    """
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read():
            return
        logger.info("compiling DeepGEMM's kernels for %d sizes in %d processes", len(sizes), processes)
        began = time.monotonic()
        failed = _run(processes, sizes, [*command, str(os.getpid())], limit_s)
        if failed:
            logger.warning("%d of %d processes failed: vLLM compiles the remaining kernels", failed, processes)
        else:
            file.write(b"compiled\n")
            logger.info("compiled DeepGEMM's kernels in %.0f s", time.monotonic() - began)


def _run(number: int, sizes: list[Size], command: Sequence[str], limit_s: float) -> int:
    """Run the processes, and return the number of those that failed."""
    deadline = time.monotonic() + limit_s
    chunks = [sizes[start : start + CHUNK] for start in range(0, len(sizes), CHUNK)]
    random.Random(0).shuffle(chunks)  # so that processes seldom need the same kernel at the same time
    processes = list[subprocess.Popen[bytes]]()
    try:
        with tempfile.TemporaryFile() as queue:
            queue.writelines(_SIZE.pack(*size) for chunk in chunks for size in chunk)
            queue.seek(0)
            processes.extend(subprocess.Popen(command, stdin=queue, stdout=subprocess.DEVNULL) for _ in range(number))
        return sum(_wait(process, deadline) != 0 for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def taken(queue: int) -> Iterator[Size]:
    """Yield sizes, which no other process gets, until none is left.

    ``queue``: a descriptor that the processes have inherited, and with it a common position in the file. Linux reads
    and moves the position in one step.
    """
    while found := os.read(queue, CHUNK * _SIZE.size):
        yield from _SIZE.iter_unpack(found)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status, or None if the process has not ended at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _cache_folder() -> Path:
    """Return DeepGEMM's cache folder, which ``vllm.utils.deep_gemm`` chooses."""
    chosen = os.environ.get("DG_JIT_CACHE_DIR")  # noqa: TID251 - DeepGEMM's setting
    return Path(chosen or Path(envs.VLLM_CACHE_ROOT) / "deep_gemm")


def compute(sizes: Iterator[Size], parent: int) -> None:
    """Compute a product of each size on the first GPU, until the parent process, given by its id, ends."""
    for m, n, k in sizes:
        if os.getppid() != parent:
            return
        codes, weight = (torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="cuda") for rows in (m, n))
        scales, weight_scales = (torch.zeros(rows, k // BLOCK, device="cuda") for rows in (m, -(-n // BLOCK)))
        product = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        fp8_gemm_nt((codes, scales), (weight, weight_scales), product)
    torch.cuda.synchronize()


if __name__ == "__main__":
    compute(taken(sys.stdin.fileno()), int(sys.argv[1]))
