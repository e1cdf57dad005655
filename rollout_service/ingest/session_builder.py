"""Creates upload sessions from announcements, with the memory, threads and plans that they share."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.config import WeightsConfig
from rollout_service.errors import InvalidRequest
from rollout_service.gpu.pinning import pin, pin_if_possible
from rollout_service.ingest.announced_tables import AnnouncedTables
from rollout_service.ingest.conversion import GPU
from rollout_service.ingest.sources.delta import DeltaOfVersion
from rollout_service.ingest.sources.folder import allowed_path
from rollout_service.ingest.sources.shared_memory import GPU_THREADS
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.ingest.trainer_weights import TrainerWeights
from rollout_service.ingest.upload_session import Resources, UploadSession
from rollout_service.model.convert import Converter
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, BroadcastSource, PathSource, SharedMemorySource
from rollout_service.runtime.threads import io_threads
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Recipe
from rollout_service.store.mapped_files import Registered
from rollout_service.store.staged_file import StagingSpace
from rollout_service.store.writer import LogMemory

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

logger = logging.getLogger(__name__)
_KEPT_FILE = "kept"
"""File beside the folders of staged versions: see ``StagingSpace``."""


class SessionBuilder:
    """Creates the upload sessions of one log."""

    def __init__(
        self,
        config: WeightsConfig,
        log: WeightLog,
        model: ServedModel,
        plan: QuantPlan,
        converter: Converter,
        recipe: Recipe,
    ) -> None:
        """``recipe``: the recipe that the converter follows, as stored in versions."""
        self._config, self._log, self._model, self._plan = config, log, model, plan
        self._converter, self._recipe = converter, recipe
        self.executor = ThreadPoolExecutor(io_threads(), thread_name_prefix="quantize")
        self.gpu_executor = ThreadPoolExecutor(GPU_THREADS, thread_name_prefix="quantize-gpu")
        self._space = StagingSpace()
        self.memory: LogMemory | None = None
        """Memory of a log in memory; None: the log is on a disk."""
        self.tables = AnnouncedTables()
        kept = config.trainer_root or log.root / "trainer"
        self.trainer_weights = TrainerWeights(
            kept, model.path, config.source_roots, config.source_urls, model.ignored, self.registered
        )

    def open(self) -> None:
        """Find out if the log is in memory, and use it as such. Call it before anything is staged.

        Raises OSError.
        """
        self.memory = LogMemory.of(self._log.root, self.registered)
        if self.memory is not None:
            kept = uploads_folder(self._log.root) / _KEPT_FILE
            self._space = StagingSpace(kept, pin if self._converter.uses_gpu else None)

    def prepare_memory(self, is_stopped: Callable[[], bool]) -> None:
        """Allocate and register memory for the next versions, and compile kernels, before a trainer waits for them.

        Does nothing for a log on a disk. Thread-safe. Raises OSError.
        """
        if self.memory is None:
            return
        versions = max(2, self._config.keep_versions) + 1 - len(self._log.versions())
        sizes = [file.nbytes for file in self._layout.files]
        self.memory.spare.make(versions * sizes, is_stopped)
        self.memory.mapped.add(self.memory.spare.paths(), is_stopped)
        if self._converter.uses_gpu:
            from rollout_service.ingest.sources import gpu_changes  # needs triton

            _ = self.plans
            gpu_changes.prepare(GPU)

    @property
    def registered(self) -> Registered | None:
        """Return a function that registers memory with the GPU that quantizes; None: the CPU quantizes."""
        return pin_if_possible if self._converter.uses_gpu else None

    def source_of(self, begin: BeginUpload) -> WeightSource | None:
        """Return a reader of the announced source; None: the tensors come in parts."""
        if isinstance(begin.source, BroadcastSource):
            raise InvalidRequest(
                "what a trainer broadcasts cannot be read again, and is begun by POST /start_weight_update: give a "
                "path or tensors"
            )
        if begin.source is None or isinstance(begin.source, SharedMemorySource):
            return None
        return self.trainer_weights.source_of(self.folder_of(begin.source))

    def folder_of(self, source: PathSource) -> Path:
        """Return the resolved folder. Raises Forbidden if it lies in none of the allowed ones."""
        return allowed_path(source.path, self._config.source_roots)

    def build(self, begin: BeginUpload, source: WeightSource | None) -> UploadSession:
        """Check the table, and return a session that expects parts, or converts the tensors of ``source``."""
        table = begin.announced_tensors if source is None else source.table
        if source is not None:
            self._model.check_table(table, self._plan)
        elif not isinstance(begin.source, BroadcastSource) and not self.tables.are_kept(table):
            self._model.check_table(table, self._plan)
            if left_out := self._model.ignored.summary(tensor.name for tensor in table):
                logger.info("version %d: %s", begin.version, left_out)
            self.tables.keep(table)
        delta = None if begin.delta is None else self._delta_of(begin)
        try:
            return UploadSession(begin, self._log.staging(begin.version), self._resources, source, delta)
        except BaseException:
            if delta is not None:
                delta.close()
            raise

    @cached_property
    def plans(self) -> "BatchPlans":
        """Plans for a GPU. The first use takes a second."""
        from rollout_service.ingest.batch_plan import BatchPlans  # needs triton, and a second to be imported

        return BatchPlans(self._converter, self._layout.places)

    @cached_property
    def _resources(self) -> Resources:
        reads_on_gpu = self.memory is not None and self._converter.uses_gpu
        return Resources(
            self._model,
            self._converter,
            self._layout,
            self._config.part_bytes,
            self.executor,
            self._space,
            self.memory,
            self.gpu_executor,
            self.plans if reads_on_gpu else None,
        )

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self._converter.slots(self._model.stored))

    def _delta_of(self, begin: BeginUpload) -> DeltaOfVersion:
        mapped = None if self.memory is None else self.memory.mapped
        return DeltaOfVersion(self._log, begin, self._recipe, self._converter, mapped)

    def close(self) -> None:
        """End the threads, and unmap all memory. No session may be open."""
        self._space.close()
        self.executor.shutdown()
        self.gpu_executor.shutdown()
        if self.memory is not None:
            self.memory.mapped.close()
