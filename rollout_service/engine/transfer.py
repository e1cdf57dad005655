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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

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
    """Loads whole versions; raises RuntimeError when a parameter, or a part of one, received nothing."""

    init_info_cls = LogInitInfo
    update_info_cls = LogUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: LogInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Put the parameters back to checkpoint layout. From here on the engine cannot generate."""
        served = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        # what vLLM derives after loading (the absorbed matrices of latent attention) is served but never loaded; a
        # tied head is loaded apart only where it is served apart
        self._expected = served & {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: LogUpdateInfo) -> None:
        """Load every tensor of the version."""
        folder = Path(update_info.folder)
        loaded = self.model.load_weights(stored_tensors(folder, read_manifest(folder)))
        missing = sorted(self._expected - loaded) if loaded is not None else []
        if missing:
            raise RuntimeError(f"{folder} left {len(missing)} parameters without weights: {missing[:5]}")
        incomplete = incomplete_modules(self.model)
        if incomplete:
            raise RuntimeError(f"{folder} left {len(incomplete)} modules incomplete: {incomplete[:5]}")

    def finish_weight_update(self) -> None:
        """Process what was loaded into the kernels' layout, in the old storage."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def incomplete_modules(model: torch.nn.Module) -> list[str]:
    """Modules that received some of their weights and not all, during a reload: one expert of many, q without k.

    The names that ``load_weights`` returns do not tell: one slice counts for the whole parameter there.
    """
    return [
        f"{name} ({info.load_numel} of {wanted} elements)"
        for name, module in model.named_modules()
        # padding is never loaded; scales of the KV cache need not be
        if not isinstance(module, VocabParallelEmbedding) and not is_deferred_attention_layer(module)
        # a module that is complete has been processed, and its count is back at zero
        if 0 < (info := get_layerwise_info(module)).load_numel < (wanted := _loadable_elements(module))
    ]


def _loadable_elements(module: torch.nn.Module) -> int:
    parameters = module.named_parameters(recurse=False)
    return sum(getattr(p, "weight_loader_numel", p.numel()) for name, p in parameters if name not in SKIP_LOAD_TENSORS)


def stored_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The version's tensors in the order of its files, one at a time, from the page cache where it has them."""
    for file, tensors in manifest.files().items():
        with safe_open(folder / file, framework="pt") as reader:
            for tensor in tensors:
                yield tensor.name, reader.get_tensor(tensor.name)
