"""The memory, threads and plans that all uploads of one ingest share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from rollout_service.config import WeightsConfig
from rollout_service.gpu.pinning import pin, pin_if_possible
from rollout_service.ingest.conversion import GPU
from rollout_service.ingest.sources.shared_memory import GPU_THREADS
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.runtime.threads import compute_threads
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.mapped_files import Registered
from rollout_service.store.staged_file import StagingSpace
from rollout_service.store.writer import LogMemory

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

KEPT_FILE = "kept"
"""File beside the folders of staged versions: see ``StagingSpace``."""


class Resources:
    """Created once by an ingest, and closed when it stops. A session takes what it needs from here."""

    def __init__(self, config: WeightsConfig, log: WeightLog, model: ServedModel, converter: Converter) -> None:
        self._config, self._log, self.part_bytes = config, log, config.part_bytes
        self.model, self.converter = model, converter
        self.registered: Registered | None = pin_if_possible if converter.uses_gpu else None
        """Registers memory with the GPU that quantizes; None: the CPU quantizes."""
        self.executor = ThreadPoolExecutor(compute_threads(), thread_name_prefix="quantize")
        """Its threads convert tensors."""
        self.gpu_executor = ThreadPoolExecutor(GPU_THREADS, thread_name_prefix="quantize-gpu")
        """Its few threads convert tensors that a GPU reads from parts, or from a trainer's memory."""
        self.space = StagingSpace()
        """Storage for received parts."""
        self.memory: LogMemory | None = None
        """Memory of a log in memory; None: the log is on a disk."""

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of every version of the model."""
        return Layout(self.converter.slots(self.model.stored))

    @cached_property
    def plans(self) -> "BatchPlans":
        """Plans for a GPU. The first use takes a second."""
        from rollout_service.ingest.batch_plan import BatchPlans  # needs triton, and a second to be imported

        return BatchPlans(self.converter, self.layout.places)

    def open(self) -> None:
        """Find out if the log is in memory, and use it as such. Call it before anything is staged.

        Raises OSError.
        """
        self.memory = LogMemory.of(self._log.root, self.registered)
        if self.memory is not None:
            kept = uploads_folder(self._log.root) / KEPT_FILE
            self.space = StagingSpace(kept, pin if self.converter.uses_gpu else None)

    def prepare_memory(self, is_stopped: Callable[[], bool]) -> None:
        """Allocate and register memory for the next versions, and compile kernels, before a trainer waits for them.

        Does nothing for a log on a disk. Thread-safe. Raises OSError.
        """
        if self.memory is None:
            return
        versions = max(2, self._config.keep_versions) + 1 - len(self._log.versions())
        self.memory.spare.make(versions * [file.nbytes for file in self.layout.files], is_stopped)
        self.memory.mapped.add(self.memory.spare.paths(), is_stopped)
        if self.converter.uses_gpu:
            from rollout_service.ingest.sources import gpu_changes  # needs triton

            _ = self.plans
            gpu_changes.prepare(GPU)

    def unmap_removed(self) -> None:
        """Unmap removed files, whose memory is otherwise not freed."""
        if self.memory is not None:
            self.memory.mapped.prune()

    def close(self) -> None:
        """End the threads, and unmap all memory. No session may be open."""
        self.space.close()
        self.executor.shutdown()
        self.gpu_executor.shutdown()
        if self.memory is not None:
            self.memory.mapped.close()
