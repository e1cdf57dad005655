"""What happened in a run, how long there was no service, and which versions were lost."""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


class Diary:
    """A file of JSON objects, one a line, each written at once; times are seconds since the run began."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._stream, self._began = path, path.open("w", buffering=1), time.perf_counter()

    def begin(self) -> None:
        """The run begins now; what came before has times below 0."""
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def note(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"at_s": round(self.now(), 2), "event": event} | fields) + "\n")

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True)
class Outage:
    """A time in which no probe was answered."""

    from_s: float  # seconds after the beginning of the run
    seconds: float

    @property
    def until_s(self) -> float:
        """When the next probe was answered, or the run ended."""
        return self.from_s + self.seconds


@dataclass
class Timeline:
    """When probes were answered, in seconds after the beginning of the run."""

    answers: list[float] = field(default_factory=list)

    def answered(self, at_s: float) -> None:
        """A probe's answer came. Answers may be noted in any order."""
        self.answers.append(at_s)

    def gaps(self, ended_s: float) -> list[Outage]:
        """Return every gap of a run that began at 0, in the order of time."""
        moments = [0.0, *sorted(at for at in self.answers if at <= ended_s), ended_s]
        return [Outage(before, after - before) for before, after in pairwise(moments)]

    def outages(self, ended_s: float, longer_than_s: float) -> list[Outage]:
        return [gap for gap in self.gaps(ended_s) if gap.seconds > longer_than_s]

    def longest(self, ended_s: float) -> Outage:
        return max(self.gaps(ended_s), key=lambda gap: gap.seconds)


@dataclass
class Versions:
    """Versions that the service said were committed, held against the newest one in its log."""

    committed: list[int] = field(default_factory=list)  # those of which the trainer was told so, in that order
    lost: set[int] = field(default_factory=set)  # those that were newer than the log's newest at some time afterwards

    @property
    def newest(self) -> int:
        """The newest that was said to be committed; -1: none."""
        return max(self.committed, default=-1)

    def said(self, version: int) -> None:
        self.committed.append(version)

    def found(self, newest: int) -> set[int]:
        """The log's newest version is ``newest`` now; returns the versions that are lost by that for the first time."""
        gone = {version for version in self.committed if version > newest} - self.lost
        self.lost |= gone
        return gone
