"""Everything that happened in a run, so that a failure can be read afterwards."""

import json
import time
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
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def note(self, event: str, **fields: Any) -> None:
        """Add a line."""
        self._stream.write(json.dumps({"at_s": round(self.now(), 2), "event": event} | fields) + "\n")

    def close(self) -> None:
        """Write no more."""
        self._stream.close()
