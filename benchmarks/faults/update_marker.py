"""A vLLM plug-in of this benchmark alone, by which two moments of a worker can be seen from outside, in ``/proc``.

From the end of a version's staging until it is loaded the worker has memory open that is called ``staged_name``. While
it loads the version it has the version's manifest mapped: what it loads was read before and leaves no trace there.
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


def staged_name(version: str | int) -> str:
    """Name the memory that is open while a version is staged and not loaded."""
    return f"staged-version-{version}"


def register() -> None:
    """vLLM calls it in each of an engine's processes."""
    from rollout_service.engine.loading.staging_calls import StageAnswer
    from rollout_service.engine.loading.transfer import LogUpdateInfo, LogWeightTransferEngine

    if hasattr(LogWeightTransferEngine, "manifest_mapped"):
        return
    stage, receive = LogWeightTransferEngine.stage, LogWeightTransferEngine.receive_weights
    finish = LogWeightTransferEngine.finish_weight_update

    def mark_staged(engine: Any, version: str | None) -> None:
        if engine.staged_memory is not None:
            os.close(engine.staged_memory)
        engine.staged_memory = None if version is None else os.memfd_create(staged_name(version))

    def stage_and_mark(engine: Any, folder: Path, digest: str | None = None) -> StageAnswer:
        answer = stage(engine, folder, digest)
        mark_staged(engine, folder.name if answer.corrupt is None else None)
        return answer

    def receive_weights(engine: Any, update_info: LogUpdateInfo) -> None:
        mark_staged(engine, None)
        with (Path(update_info.folder) / "manifest.json").open("rb") as manifest:
            engine.manifest_mapped = mmap.mmap(manifest.fileno(), 0, access=mmap.ACCESS_READ)
        receive(engine, update_info)

    def finish_weight_update(engine: Any) -> None:
        finish(engine)
        engine.manifest_mapped.close()

    marked: Any = LogWeightTransferEngine
    marked.manifest_mapped = marked.staged_memory = None
    marked.stage, marked.receive_weights, marked.finish_weight_update = (
        stage_and_mark, receive_weights, finish_weight_update,
    )  # fmt: skip
