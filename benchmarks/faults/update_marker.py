"""A vLLM plug-in of this benchmark alone: while a worker loads a version, it has the version's manifest mapped.

So the moment can be seen from outside, in ``/proc``; what a worker loads was read before and leaves no trace there.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.paths import PROJECT


@contextmanager
def marked_updates() -> Iterator[None]:
    """Have vLLM find the plug-in in the processes that are started inside the block."""
    with tempfile.TemporaryDirectory(prefix="update-marker-") as folder:
        declared = Path(folder) / "update_marker-0.dist-info"
        declared.mkdir()
        (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: update-marker\nVersion: 0\n")
        (declared / "entry_points.txt").write_text(f"[vllm.general_plugins]\nupdate_marker = {__name__}:register\n")
        with pytest.MonkeyPatch.context() as environment:
            for path in (str(PROJECT), folder):
                environment.setenv("PYTHONPATH", path, prepend=os.pathsep)
            yield


def register() -> None:
    """vLLM calls it in each of an engine's processes."""
    from rollout_service.engine.loading.transfer import LogUpdateInfo, LogWeightTransferEngine

    if hasattr(LogWeightTransferEngine, "manifest_mapped"):
        return
    receive, finish = LogWeightTransferEngine.receive_weights, LogWeightTransferEngine.finish_weight_update

    def receive_weights(engine: Any, update_info: LogUpdateInfo) -> None:
        with (Path(update_info.folder) / "manifest.json").open("rb") as manifest:
            engine.manifest_mapped = mmap.mmap(manifest.fileno(), 0, access=mmap.ACCESS_READ)
        receive(engine, update_info)

    def finish_weight_update(engine: Any) -> None:
        finish(engine)
        engine.manifest_mapped.close()

    marked: Any = LogWeightTransferEngine
    marked.manifest_mapped = None
    marked.receive_weights, marked.finish_weight_update = receive_weights, finish_weight_update
