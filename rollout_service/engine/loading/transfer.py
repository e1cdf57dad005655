"""Our weight-transfer engine: loads a committed version from the log's files into a running vLLM worker.

``plugin.py`` registers it with vLLM under ``TRANSFER_BACKEND``. The RPC carries only the folder's path, because vLLM
0.32 cannot pass tensors.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from rollout_service.compat.vllm_internals import (
    Attention,
    MambaBase,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    name_partial_loaders,
)
from rollout_service.engine.kernels.deep_gemm import compile_kernels
from rollout_service.engine.loading.copy_plan import CopyPlan, CopyRecorder, NoPlan, Sources, placement_of
from rollout_service.engine.loading.layerwise import (
    DirectCopies,
    incomplete_modules,
    names_of_parameters,
    renew_convolutions,
    renew_tied_head,
    unloaded_modules,
)
from rollout_service.engine.loading.rebind import (
    Held,
    Unbound,
    bind_to_parameters,
    buffer_digests,
    held_tensors,
    require_same_buffers,
)
from rollout_service.engine.loading.staging import (
    CannotStage,
    Staged,
    Stager,
    StagingBuffer,
    area_bytes,
    choose_staging,
)
from rollout_service.engine.loading.staging_calls import StageAnswer, StagingServer
from rollout_service.engine.loading.stored_tensors import stored_tensors
from rollout_service.engine.plugin import STAGING_KEY
from rollout_service.engine.sleeping import staging_memory
from rollout_service.errors import LogCorrupt
from rollout_service.kv_scales.worker import load_kv_scales
from rollout_service.protocol.fleet import Staging
from rollout_service.runtime.memory import memory
from rollout_service.store.manifest import read_manifest

logger = logging.getLogger(__name__)


class LoadReport(TypedDict, total=False):
    """A report of how a version was loaded. Plain values, because it is sent to another process."""

    way: Literal["plan", "layerwise"]
    copies: int
    """Number of byte ranges in the plan."""
    unstaged: str
    """The reason why it was read from its files."""
    no_plan: str
    """The reason why there is no plan."""
    bound: int
    """Number of tensors outside the model that were bound to parameters, see ``bind_to_parameters``."""
    kv_scales: int
    """Number of changed KV scales."""
    staging: str
    """Kind of staging buffer: ``device`` or ``host``."""
    area_bytes: int
    """Size of the staging buffer."""
    staged_bytes: int
    ahead_bytes: int
    """Bytes of the log's files that were read before the version was committed."""


@dataclass
class LogInitInfo(WeightTransferInitInfo):
    """Empty: nothing is negotiated in advance."""


@dataclass
class LogUpdateInfo(WeightTransferUpdateInfo):
    """The version to load."""

    folder: str
    """The version's folder in the log."""


class LogWeightTransferEngine(WeightTransferEngine[LogInitInfo, LogUpdateInfo]):
    """Loads whole versions. Raises RuntimeError if a parameter, or a part of one, received nothing.

    A version is read and checked into a staging buffer, if there is one, before the engine pauses. Loading the first
    version records a ``CopyPlan``, which stages and copies later versions of the same layout. Without a plan, vLLM's
    layerwise reload loads each version, from the buffer if it holds the whole version, else from the files.
    """

    init_info_cls = LogInitInfo
    update_info_cls = LogUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        kind, parallel = vllm_config.additional_config.get(STAGING_KEY), vllm_config.parallel_config
        self._area: StagingBuffer | None = None
        refused = None
        self.why_there: str | None = None
        """The cost of each kind of staging buffer, if the kind was chosen here."""
        if current_platform.is_cpu():
            _refuse_state_space(model)
        else:
            compile_kernels(model, vllm_config.scheduler_config.max_num_batched_tokens, device)
        if kind == "auto":
            _, total = torch.cuda.mem_get_info(device)
            usable = int(total * vllm_config.cache_config.gpu_memory_utilization)
            left = usable - torch.cuda.memory_allocated(device)  # the weights, and nothing else yet
            kind, self.why_there = choose_staging(area_bytes(model), left, memory().free_bytes, parallel.world_size)
        self.staging: Staging = kind or "none"
        """The kind of staging buffer."""
        if self.staging != "none":
            try:
                # must precede vLLM's measurement of free memory for the KV cache
                with staging_memory(vllm_config, device):
                    self._area = StagingBuffer(self.staging, model, device, parallel.world_size)
            except CannotStage as error:
                self.staging, refused = "none", str(error)
                logger.warning("versions are loaded layer by layer from their files: %s", error)
        self._stager = Stager(self._area, parallel.rank, refused)
        self._buffers = buffer_digests(model) if self._area is not None else {}
        self._plan: CopyPlan | None = None
        # the CPU's kernels keep packed copies of weights, which no plan would renew
        self.may_plan = not current_platform.is_cpu()
        """False: every version is loaded layerwise."""
        self._no_plan: dict[str, str] = {}
        """The last layout that got no plan, with the reason."""
        self._recorded: tuple[CopyRecorder, list[Held]] | None = None
        """The copies of the current reload, and the tensors held before it."""
        self._layerwise: Staged | None = None
        self._copied_directly: list[torch.nn.Module] = []
        name_partial_loaders(model)
        self._kv_scales: dict[str, float] | None = None
        self.report: LoadReport = {}
        """A report on the last load."""

    def init_transfer_engine(self, init_info: LogInitInfo) -> None:
        """Do nothing: there is no connection."""

    def stage(self, folder: Path, digest: str | None = None) -> StageAnswer:
        """Read and check a version while the engine serves. Thread-safe. ``digest``: of the expected manifest.

        Raises the error that ended reading, except LogCorrupt.
        """
        return self._stager.stage(folder, digest, self._plan)

    @functools.cached_property
    def staging_server(self) -> StagingServer:
        """The server through which replicas call ``stage``, until the worker's process ends."""
        return StagingServer(self.stage)

    def forget_staged(self) -> None:
        """Discard the staged version."""
        self._stager.forget()

    def start_weight_update(self) -> None:
        """Do nothing: the way of loading depends on the version."""

    def receive_weights(self, update_info: LogUpdateInfo) -> None:
        """Load every tensor of the version. From here on the engine cannot generate."""
        folder = Path(update_info.folder)
        self._stager.finish()  # the read-ahead uses the same staging buffer
        staged = self._stager.staged(folder)
        if staged is None:
            manifest = read_manifest(folder)
            staged = Staged(folder, manifest, manifest.places.slots_digest, None, refused="it was not staged")
        self._kv_scales = staged.manifest.kv_scales
        if self._plan is not None and staged.placement is self._plan.placement:
            self._plan.run()
            self.report = {"way": "plan", "copies": self._plan.num_copies}
        else:
            self._load_layerwise(staged)
            self.report = {"way": "layerwise"}
        if staged.ahead_bytes:
            self.report["ahead_bytes"] = staged.ahead_bytes
        if staged.refused is not None:
            self.report["unstaged"] = staged.refused

    def finish_weight_update(self) -> None:
        """Process loaded weights into the kernels' layout in their old storage, unless a plan loaded them. Load the
        scales of an FP8 KV cache."""
        if self._layerwise is not None:
            finalize_layerwise_reload(self.model, self.model_config)
            if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
                renew_tied_head(self.model)
            renew_convolutions(self.model)
            self._learn(self._layerwise)
            self._layerwise = None
        if self._area is not None and self.device.type == "cuda":
            # the copies are only queued, and another stream will write the next version into the buffer
            torch.cuda.synchronize(self.device)
        self._stager.loaded(self._plan)
        if self._area is not None and self._area.limit_bytes is not None:
            staged_bytes = 0 if self._plan is None else self._plan.placement.nbytes
            self.report |= {"staging": self.staging, "area_bytes": self._area.limit_bytes, "staged_bytes": staged_bytes}
        self.report["kv_scales"] = load_kv_scales(self.model, self.model_config, self._kv_scales)

    def shutdown(self) -> None:
        """Wait until reading has ended."""
        self._stager.finish()

    def _load_layerwise(self, staged: Staged) -> None:
        unloaded = self._load_all(staged)
        if unloaded and not self._copied_directly:
            # found once and remembered: finish this reload, which leaves these modules unchanged, and begin another
            self._copied_directly = list(unloaded.values())
            finalize_layerwise_reload(self.model, self.model_config)
            unloaded = self._load_all(staged)
        if unloaded:
            raise RuntimeError(
                f"{staged.folder} left {len(unloaded)} modules without weights: {sorted(unloaded)[:5]}. vLLM's "
                f"{type(self.model).__name__} loads them in a way that its layerwise reload does not notice"
            )
        if incomplete := incomplete_modules(self.model):
            raise RuntimeError(f"{staged.folder} left {len(incomplete)} modules incomplete: {incomplete[:5]}")

    def _load_all(self, staged: Staged) -> dict[str, torch.nn.Module]:
        """Load every tensor in a layerwise reload, and return the modules that received nothing, by name."""
        served, names = {name for name, _ in self.model.named_parameters()}, names_of_parameters(self.model)
        self._layerwise, sources = staged, Sources()
        recording = self._record_copies(staged, sources)
        initialize_layerwise_reload(self.model)
        # vLLM derives some tensors after loading (latent attention's absorbed matrices); these are served but never
        # loaded. A tied head is loaded separately only where it is served separately.
        expected = served & {name for name, _ in self.model.named_parameters()}
        with recording, DirectCopies(self._copied_directly) if self._copied_directly else nullcontext():
            loaded = self.model.load_weights(self._tensors(staged, sources))
        missing = [] if loaded is None else sorted(name for name in expected if loaded.isdisjoint(names[name]))
        if missing:
            raise RuntimeError(f"{staged.folder} left {len(missing)} parameters without weights: {missing[:5]}")
        return unloaded_modules(self.model, expected)

    def _tensors(self, staged: Staged, sources: Sources) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = stored_tensors(staged.folder, staged.manifest)
        if self._area is not None and staged.placement is not None and staged.is_whole:
            tensors = self._area.tensors(staged.manifest, staged.placement)
        for name, tensor in tensors:
            sources.add(name, tensor)
            yield name, tensor

    def _record_copies(self, staged: Staged, sources: Sources) -> AbstractContextManager[object]:
        """Return the context that records copies for a plan, if possible. Call it before the reload begins."""
        self._recorded = None
        if self._area is None or not self.may_plan or staged.layout in self._no_plan:
            return nullcontext()
        recorder = CopyRecorder(self.model, sources)
        self._recorded = recorder, list(held_tensors(self.model))
        return recorder

    def _learn(self, staged: Staged) -> None:
        """Build the plan for the next versions, if possible."""
        self._plan = None
        recorded, self._recorded = self._recorded, None
        if self._area is None or recorded is None:
            if staged.layout in self._no_plan:
                self.report["no_plan"] = self._no_plan[staged.layout]
            return
        recorder, held_before = recorded
        try:
            # expert kernels still read the scales of temporary parameters, which a plan cannot reach
            self.report["bound"] = bind_to_parameters(self.model, held_before)
            require_same_buffers(self.model, self._buffers)
            placement = placement_of(recorder.copies, staged.manifest)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the copies from the staging buffer have finished
            self._area.fill(staged.folder, staged.manifest, placement, every=False)
            plan = CopyPlan.build(staged.layout, placement, recorder.copies, self.model, self._area.memory)
            plan.run()  # repeats the same bytes, so that the kernel is compiled now and not while rollouts wait
            self._plan = plan
        except (NoPlan, Unbound, CannotStage, LogCorrupt, OSError) as reason:
            logger.warning("versions are loaded by vLLM's layerwise reload: %s", reason)
            self.report["no_plan"] = str(reason)
            if isinstance(reason, (NoPlan, Unbound)):  # otherwise another version may still get a plan
                self._no_plan = {staged.layout: str(reason)}


def _refuse_state_space(model: torch.nn.Module) -> None:
    """Raise ValueError for models that crash vLLM 0.32.0 on the CPU: Mamba 1, whose packed convolutions it cannot read,
    and Mamba 2 without attention layers."""
    layers = list(model.modules())
    kinds = {module.mamba_type.name for module in layers if isinstance(module, MambaBase)}
    if "MAMBA1" in kinds or ("MAMBA2" in kinds and not any(isinstance(module, Attention) for module in layers)):
        raise ValueError(
            f"{type(model).__name__} has state-space layers that vLLM's CPU engine does not compute: Mamba of the "
            "first kind, or of the second without attention layers beside it. Serve it on a GPU"
        )
