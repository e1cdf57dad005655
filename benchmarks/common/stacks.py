"""Which functions a process spends its time in, where no profiler can be attached: see ``stack_samples``."""

import json
import os
import runpy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SAMPLER = Path(__file__).parent / "stack_samples"
FOLDER = "BENCHMARK_STACK_SAMPLES"


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """This process and those that are started in the block write their samples into ``folder``."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER)}  # noqa: TID251 - processes inherit it
    path = [str(SAMPLER), *filter(None, [before["PYTHONPATH"]])]
    os.environ.update({"PYTHONPATH": os.pathsep.join(path), FOLDER: str(folder)})  # noqa: TID251
    sampler = runpy.run_path(str(SAMPLER / "sitecustomize.py"))
    try:
        yield
    finally:
        sampler["stop"]()
        for name, value in before.items():
            os.environ.pop(name)  # noqa: TID251
            if value is not None:
                os.environ[name] = value  # noqa: TID251


@dataclass(frozen=True)
class Profile:
    """Samples of one thread of one process."""

    stacks: dict[tuple[str, ...], int]
    """Functions, the outermost first → times seen."""

    @property
    def samples(self) -> int:
        """All of them."""
        return sum(self.stacks.values())

    def innermost(self) -> dict[str, float]:
        """Share of the samples in which a function itself ran, or what it calls that is not Python."""
        found = Counter[str]()
        for stack, count in self.stacks.items():
            found[stack[-1]] += count
        return self._shares(found)

    def within(self) -> dict[str, float]:
        """Share of the samples in which a function ran, or one that it called."""
        found = Counter[str]()
        for stack, count in self.stacks.items():
            found.update(dict.fromkeys(stack, count))
        return self._shares(found)

    def _shares(self, found: Counter[str]) -> dict[str, float]:
        return {name: count / self.samples for name, count in found.most_common()}


def profiles(folder: Path, begin: float, end: float) -> dict[tuple[str, str], Profile]:
    """Of each process and thread, the samples between two times of ``time.monotonic``; by title and thread's name."""
    found: dict[tuple[str, str], Counter[tuple[str, ...]]] = {}
    for process, stacks in _lines(sorted(folder.glob("*.jsonl")), begin, end):
        for stack, count in stacks.items():
            thread, *functions = stack.split(";")
            if functions:
                found.setdefault((process, thread), Counter())[tuple(functions)] += count
    return {key: Profile(dict(stacks)) for key, stacks in found.items()}


def _lines(files: Iterable[Path], begin: float, end: float) -> Iterator[tuple[str, dict[str, int]]]:
    for file in files:
        for line in file.read_text().splitlines():
            written = json.loads(line)
            if begin <= written["at"] <= end:
                yield written["process"], written["stacks"]
