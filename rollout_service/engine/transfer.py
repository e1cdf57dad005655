"""Our weight-transfer engine: loads a committed version from the log's files into a running vLLM worker.

Registered with vLLM by ``plugin.py`` under ``TRANSFER_BACKEND``. Only the folder's path travels through the RPC (vLLM
0.32 cannot pass tensors there).
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollout_service.calibration.measurement import KVMeasurement
from rollout_service.engine.held_tensors import (
    Held,
    Unbound,
    bind_to_parameters,
    buffer_digests,
    held_tensors,
    require_same_buffers,
)
from rollout_service.engine.kv_measure import measure_kv
from rollout_service.engine.kv_scales import load_kv_scales
from rollout_service.engine.load_plan import CopyRecorder, LoadPlan, NoPlan
from rollout_service.engine.plugin import STAGING_KEY
from rollout_service.engine.staging_area import Staged, StagingArea
from rollout_service.engine.vllm_internals import (
    VocabParallelEmbedding,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    is_deferred_attention_layer,
    load_progress,
)
from rollout_service.weights.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)


@dataclass
class LogInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class LogUpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    folder: str
    """The version's folder in the log."""
    kv_scales: dict[str, float] | None = None
    """Those of the version, if they are not in its manifest."""


class LogWeightTransferEngine(WeightTransferEngine[LogInitInfo, LogUpdateInfo]):
    """Loads whole versions; raises RuntimeError when a parameter, or a part of one, received nothing.

    With a staging area, a version is read into it before the engine closes, and the first one teaches a ``LoadPlan``.
    Later ones of the same layout are copied by that plan; without one, vLLM's layerwise reload loads each.
    """

    init_info_cls = LogInitInfo
    update_info_cls = LogUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        kind = vllm_config.additional_config.get(STAGING_KEY)
        # now, before vLLM measures how much memory is left for the KV cache
        self._area = StagingArea(kind, model, device) if kind is not None else None
        self._buffers = buffer_digests(model) if kind is not None else {}
        self._plan: LoadPlan | None = None
        self._may_plan = True
        self._recorder: CopyRecorder | None = None
        self._held_before: list[Held] = []
        self._layerwise: Staged | None = None
        self._is_layerwise = False
        self._kv_scales: dict[str, float] | None = None
        self.report: dict[str, Any] = {}
        """How the last version was loaded: ``way`` (``plan`` or ``layerwise``), ``copies`` of the plan, ``no_plan``:
        why there is none, ``bound``: see ``bind_to_parameters``, ``kv_scales``: how many were changed."""

    def init_transfer_engine(self, init_info: LogInitInfo) -> None:
        """Nothing to connect to."""

    def stage(self, folder: Path) -> None:
        """Begin to read a version while the engine serves."""
        if self._area is not None:
            self._area.start(folder)

    def is_staged(self) -> bool:
        """Whether that is done. Raises ValueError or OSError when it failed."""
        return self._area is None or self._area.is_done()

    def plan_loads(self, allowed: bool) -> None:
        """Whether versions may be loaded by a plan; the next one is layerwise in either case."""
        self._plan, self._may_plan = None, allowed

    def start_weight_update(self) -> None:
        """Nothing yet: which way it goes depends on the version."""

    def receive_weights(self, update_info: LogUpdateInfo) -> None:
        """Load every tensor of the version. From here on the engine cannot generate."""
        folder = Path(update_info.folder)
        staged = self._area.staged(folder) if self._area is not None else None
        manifest = staged.manifest if staged is not None else read_manifest(folder)
        self._kv_scales = manifest.kv_scales if update_info.kv_scales is None else update_info.kv_scales
        if staged is not None and self._plan is not None and self._plan.layout == staged.layout:
            self._plan.run()
            self.report = {"way": "plan", "copies": self._plan.num_copies}
        else:
            self._load_layerwise(folder, manifest, staged)

    def finish_weight_update(self) -> None:
        """Process what was loaded into the kernels' layout, in the old storage, which a plan has no need of.

        Then the scales of an FP8 KV cache.
        """
        if self._is_layerwise:
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_layerwise = False
            self._learn()
        self.report["kv_scales"] = load_kv_scales(self.model, self.model_config, self._kv_scales)

    def set_kv_scales(self, scales: dict[str, float] | None) -> None:
        """Other scales for the same weights. Nothing may be cached; raises what ``load_kv_scales`` raises."""
        load_kv_scales(self.model, self.model_config, scales)

    def measure_kv(self, sequences: list[list[int]], scales: dict[str, float] | None) -> KVMeasurement:
        """See ``engine/kv_measure.py``."""
        return measure_kv(self.model, self.vllm_config, self.device, sequences, scales)

    def shutdown(self) -> None:
        """Let the reading end."""
        if self._area is not None:
            self._area.finish()

    def _load_layerwise(self, folder: Path, manifest: Manifest, staged: Staged | None) -> None:
        served = {name for name, _ in self.model.named_parameters()}
        self._is_layerwise, self._layerwise = True, staged
        initialize_layerwise_reload(self.model)
        # what vLLM derives after loading (the absorbed matrices of latent attention) is served but never loaded; a
        # tied head is loaded apart only where it is served apart
        expected = served & {name for name, _ in self.model.named_parameters()}
        with self._recorded(staged):
            loaded = self.model.load_weights(self._tensors(folder, manifest, staged))
        missing = sorted(expected - loaded) if loaded is not None else []
        if missing:
            raise RuntimeError(f"{folder} left {len(missing)} parameters without weights: {missing[:5]}")
        incomplete = incomplete_modules(self.model)
        if incomplete:
            raise RuntimeError(f"{folder} left {len(incomplete)} modules incomplete: {incomplete[:5]}")

    def _tensors(self, folder: Path, manifest: Manifest, staged: Staged | None) -> Iterator[tuple[str, torch.Tensor]]:
        if self._area is None or staged is None:
            return stored_tensors(folder, manifest)
        return self._area.tensors(staged)

    def _recorded(self, staged: Staged | None) -> AbstractContextManager[object]:
        self._recorder = None
        if self._area is None or staged is None or not self._may_plan:
            return nullcontext()
        self._held_before = list(held_tensors(self.model))
        self._recorder = CopyRecorder(self.model, self._area.memory)
        return self._recorder

    def _learn(self) -> None:
        """Make the plan for the next versions, if there can be one."""
        self.report, self._plan = {"way": "layerwise"}, None
        recorder, staged, self._recorder, self._layerwise = self._recorder, self._layerwise, None, None
        held_before, self._held_before = self._held_before, []
        if self._area is None or recorder is None or staged is None:
            return
        try:
            # expert kernels still read the scales of temporary parameters, which no plan reaches
            self.report["bound"] = bind_to_parameters(self.model, held_before)
            require_same_buffers(self.model, self._buffers)
            plan = LoadPlan.build(staged.layout, recorder.copies, self.model, self._area.memory)
            plan.run()  # the same bytes once more: its kernel is compiled now, and not while rollouts wait
            self._plan = plan
        except (NoPlan, Unbound) as reason:
            logger.warning("versions are loaded by vLLM's layerwise reload: %s", reason)
            self.report["no_plan"] = str(reason)


def incomplete_modules(model: torch.nn.Module) -> list[str]:
    """Modules that received some of their weights and not all, during a reload: one expert of many, q without k.

    The names that ``load_weights`` returns do not tell: one slice counts for the whole parameter there.
    """
    return [
        f"{name} ({loaded} of {wanted} elements)"
        for name, module in model.named_modules()
        # padding is never loaded; scales of the KV cache need not be
        if not isinstance(module, VocabParallelEmbedding) and not is_deferred_attention_layer(module)
        for loaded, wanted in [load_progress(module)]
        if 0 < loaded < wanted
    ]


def stored_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The version's tensors in the order of its files, one at a time, from the page cache where it has them."""
    for file, tensors in manifest.files().items():
        with safe_open(folder / file, framework="pt") as reader:
            for tensor in tensors:
                yield tensor.name, reader.get_tensor(tensor.name)
