"""Our weight-transfer engine: loads a committed version from the log's files into a running vLLM worker.

Registered with vLLM by ``plugin.py`` under ``TRANSFER_BACKEND``. vLLM's layerwise reload does the work between
``start`` and ``finish``; only the folder's path travels through the RPC (vLLM 0.32 cannot pass tensors there).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout_service.weights.manifest import Manifest, read_manifest


@dataclass
class LogInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class LogUpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    folder: str
    """The version's folder in the log."""


class LogWeightTransferEngine(WeightTransferEngine[LogInitInfo, LogUpdateInfo]):
    """Loads whole versions; raises RuntimeError when a parameter of the model received nothing."""

    init_info_cls = LogInitInfo
    update_info_cls = LogUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: LogInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Put the parameters back to checkpoint layout. From here on the engine cannot generate."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LogUpdateInfo) -> None:
        """Load every tensor of the version."""
        folder = Path(update_info.folder)
        loaded = self.model.load_weights(stored_tensors(folder, read_manifest(folder)))
        missing = sorted(self._expected - loaded) if loaded is not None else []
        if missing:
            raise RuntimeError(f"{folder} left {len(missing)} parameters without weights: {missing[:5]}")

    def finish_weight_update(self) -> None:
        """Process what was loaded into the kernels' layout, in the old storage."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def stored_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The version's tensors in the order of its files, one at a time, from the page cache where it has them."""
    for file, tensors in manifest.files().items():
        with safe_open(folder / file, framework="pt") as reader:
            for tensor in tensors:
                yield tensor.name, reader.get_tensor(tensor.name)
