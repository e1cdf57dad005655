"""What a worker does with the next version while the engine serves: its part goes into the staging area, checked.

One reader: a worker checks the bytes that it will load from, in the memory that they are copied from, and rank 0 checks
all others, so that the whole version was checked before the engine closes. A version that cannot lie in the area is
checked by rank 0 alone, and checked again as each worker reads it while the engine is closed.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pydantic import ValidationError

from rollout_service.engine.loading.copy_plan import CopyPlan
from rollout_service.engine.loading.placement import Placement, layout_of
from rollout_service.engine.loading.staging_buffer import CannotStage, StagingBuffer
from rollout_service.errors import LogCorrupt
from rollout_service.store.log import verify_tensors
from rollout_service.store.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)


class StagingState(TypedDict):
    """How far a worker is with reading a version. Plain values, since it leaves the process."""

    done: bool
    refused: str | None
    """Why the version is not in the staging area."""
    corrupt: tuple[str, dict[str, object]] | None
    """Message and detail of a LogCorrupt."""


@dataclass(frozen=True)
class Staged:
    """A version that was read and checked."""

    folder: Path
    manifest: Manifest
    layout: str
    """See ``layout_of``."""
    placement: Placement | None
    """What of it lies in the area; None: nothing."""
    is_whole: bool = False
    """Whether that is every tensor."""
    refused: str | None = None
    """Why nothing lies there."""


class Stager:
    """One worker's: reads in a thread of its own."""

    def __init__(self, area: StagingBuffer | None, rank: int, refused: str | None = None) -> None:
        """``rank``: of this engine's workers. ``refused``: why there is no area, if one was asked for."""
        self._area, self._rank, self._refused = area, rank, refused
        self._thread = ThreadPoolExecutor(1, "stage")
        self._reading: Future[Staged] | None = None
        self._asked: tuple[Path, str | None] | None = None

    def start(self, folder: Path, digest: str | None, plan: CopyPlan | None) -> None:
        """Begin to read a version as ``plan`` loads it; nothing is left of the one before.

        ``digest``: of the manifest that is meant; None: whichever is there. What was staged and not loaded is not read
        again.
        """
        if (folder, digest) == self._asked and digest is not None and not self._failed():
            return
        self._asked = folder, digest
        self._reading = self._thread.submit(self._read, folder, digest, plan)

    def state(self) -> StagingState:
        """How far the reading is. Raises what ended it, but for a LogCorrupt."""
        state: StagingState = {"done": True, "refused": None, "corrupt": None}
        if self._reading is None:
            return state
        if not self._reading.done():
            return {**state, "done": False}
        try:
            return {**state, "refused": self._reading.result().refused}
        except LogCorrupt as error:
            return {**state, "corrupt": (error.message, error.detail)}

    def staged(self, folder: Path) -> Staged | None:
        """The version in ``folder``, if it was read and checked."""
        if self._reading is None or not self._reading.done() or self._failed():
            return None
        staged = self._reading.result()
        return staged if staged.folder == folder else None

    def forget(self) -> None:
        """The version was loaded."""
        self.finish()
        self._reading = self._asked = None
        if self._area is not None:
            self._area.release()

    def finish(self) -> None:
        """Wait until nothing is read any more."""
        if self._reading is not None:
            wait([self._reading])

    def _failed(self) -> bool:
        return self._reading is not None and self._reading.done() and self._reading.exception() is not None

    def _read(self, folder: Path, digest: str | None, plan: CopyPlan | None) -> Staged:
        try:
            manifest = read_manifest(folder)
            if digest not in (None, manifest.digest):
                raise LogCorrupt(f"{folder} holds a version with digest {manifest.digest}, not {digest}")
            return self._into_area(folder, manifest, plan)
        except (OSError, ValidationError) as error:
            raise LogCorrupt(f"{folder} cannot be read: {error}") from error

    def _into_area(self, folder: Path, manifest: Manifest, plan: CopyPlan | None) -> Staged:
        layout = layout_of(manifest)
        try:
            if self._area is None:
                raise CannotStage(self._refused or "engine.staging is none")
            planned = plan is not None and plan.layout == layout
            placement = plan.placement if plan is not None and planned else Placement.whole(manifest)
            self._area.fill(folder, manifest, placement, every=self._rank == 0)
            return Staged(folder, manifest, layout, placement, is_whole=not planned)
        except CannotStage as refusal:
            if self._rank == 0:
                verify_tensors(manifest, folder)
            return Staged(folder, manifest, layout, None, refused=str(refusal))
