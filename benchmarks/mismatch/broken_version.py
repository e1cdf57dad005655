"""A version whose quantized weights are wrong and whose unquantized ones are right: a defect in the quantizer.

Written into both logs by their own writer, with right digests: nothing in the service could refuse it. The ingest is
not asked, and must not write at that moment; replicas find the version when they next read the log
(``weights.poll_s``).
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout_service.model.convert import tensor_bytes
from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.unquantized import unquantized_root
from rollout_service.store.writer import VersionWriter

Change = Callable[[str, torch.Tensor], torch.Tensor]


def commit_broken(root: Path, version: int, layer: int) -> None:
    """Commit the newest version in ``root`` again as ``version``, with all block scales of one layer doubled."""
    of_layer = re.compile(rf"model\.layers\.{layer}\..*{SCALE_SUFFIX}")
    doubled: list[str] = []

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not of_layer.fullmatch(name):
            return tensor
        doubled.append(name)
        return tensor * 2

    commit_again(WeightLog(root), version, change)
    commit_again(WeightLog(unquantized_root(root)), version, lambda _, tensor: tensor)
    if not doubled:
        raise ValueError(f"the version in {root} has no quantized layer {layer}")


def commit_again(log: WeightLog, version: int, change: Change) -> None:
    """Commit the newest version of ``log`` once more as ``version``, each tensor as ``change`` has it."""
    head = log.head()
    if head is None:
        raise ValueError(f"{log.root} holds no version")
    manifest, folder = log.manifest(head.version), log.staging(version)
    folder.mkdir(parents=True)
    slots = [TensorSlot(name=t.name, dtype=t.dtype, shape=t.shape) for t in manifest.tensors]
    writer = VersionWriter(folder, Layout(slots))
    for file in manifest.files():
        for name, tensor in load_file(log.folder(head.version) / file).items():
            writer.write(name, tensor_bytes(change(name, tensor)))
    log.commit(manifest.replace(version=version, tensors=writer.finish()), "keep")
