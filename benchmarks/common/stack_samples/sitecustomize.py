"""Samples the stacks of all threads of a Python process, from its start on: for processes that a benchmark does not
start itself, such as vLLM's. Python imports a module of this name by itself where its folder is on PYTHONPATH; it does
nothing unless ``BENCHMARK_STACK_SAMPLES`` names a folder. See ``benchmarks/common/stacks.py``, which sets both.

Each process appends a line of JSON a period to ``<pid>.jsonl``: ``at``, by ``time.monotonic``; ``process``, its title;
``stacks``, thread and functions from the outermost on, joined by ``;``, to how often they were seen.
"""

import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

FOLDER = "BENCHMARK_STACK_SAMPLES"
INTERVAL_S = 0.005
PERIOD_S = 0.5
SWITCH_S = 0.0005
"""How long a thread may go on that another one waits for: Python's 5 ms would delay each sample by as much."""


def stack_of(frame: FrameType | None) -> list[str]:
    """Functions with their files, the outermost first."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def title() -> str:
    """As ``ps`` shows it: vLLM gives its processes names of their own."""
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def frames() -> dict[int, FrameType]:
    """Of each thread. Python holds a lock meanwhile that a garbage collection may wait for, in this very thread."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def sample(folder: Path) -> None:
    """Until it is stopped, or the folder is gone."""
    mine = threading.get_ident()
    while not stopping.is_set():
        stacks, until = Counter[str](), time.monotonic() + PERIOD_S
        while time.monotonic() < until and not stopping.wait(INTERVAL_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in frames().items():
                if ident != mine:
                    stacks[";".join([names.get(ident, "?"), *stack_of(frame)])] += 1
        line = json.dumps({"at": time.monotonic(), "process": title(), "stacks": stacks})
        try:
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(line + "\n")
        except FileNotFoundError:
            return


def start() -> None:
    """In a thread of its own, which ends with the process."""
    global sampling  # noqa: PLW0603 - the module is the process's only sampler
    if folder := os.environ.get(FOLDER):  # noqa: TID251 - there is nobody who could pass it
        sys.setswitchinterval(SWITCH_S)
        sampling = threading.Thread(target=sample, args=(Path(folder),), name="stack samples", daemon=True)
        sampling.start()


def stop() -> None:
    """Leave the process as it was. The last line is written."""
    stopping.set()
    if sampling is not None:
        sampling.join()
        sys.setswitchinterval(before)


stopping = threading.Event()
sampling: threading.Thread | None = None
before = sys.getswitchinterval()
start()
os.register_at_fork(after_in_child=start)
