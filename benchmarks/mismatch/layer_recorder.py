"""What modules of an engine's model get and make, written down in its worker for ``benchmarks.mismatch.layers``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rollout_service.engine.worker import VersionStaging

RECORDED = (
    "input_layernorm", "qkv_proj", "q_norm", "k_norm", "attn", "o_proj", "post_attention_layernorm", "gate_up_proj",
    "act_fn", "down_proj", "model.norm",
)  # fmt: skip
"""Ends of names. The rotary embedding is one module for all layers: it stands between ``q_norm`` and ``attn``."""

Recorded = dict[str, dict[str, list[torch.Tensor]]]
"""Module → ``inputs`` and ``outputs``, tensors [tokens, ...] on the CPU, the tokens of all calls one after another."""


class LayerRecorder(VersionStaging):
    """For vLLM's ``worker_extension_cls``."""

    def record_layers(self) -> None:
        """Keep what modules get and make from now on; what was kept before is dropped."""
        self._calls: dict[str, dict[str, list[list[torch.Tensor]]]] = {}
        if not hasattr(self, "_hooks"):
            model: nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
            self._hooks = [
                hook
                for name, module in model.named_modules()
                if name.endswith(RECORDED)
                for hook in (
                    module.register_forward_pre_hook(self._keeping(name, "inputs")),
                    module.register_forward_hook(self._keeping(name, "outputs")),
                )
            ]

    def save_layers(self, path: str) -> None:
        """Write them, ``Recorded``, to a file for ``torch.load``."""
        recorded: Recorded = {
            name: {kind: [torch.cat(parts) for parts in zip(*calls, strict=True)] for kind, calls in kinds.items()}
            for name, kinds in self._calls.items()
        }
        torch.save(recorded, path)

    def _keeping(self, name: str, kind: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, outputs: Any = None) -> None:
            kept = self._calls.setdefault(name, {}).setdefault(kind, [])
            # copied: vLLM's norms write over their inputs
            kept.append([tensor.cpu().clone() for tensor in _tensors(inputs if kind == "inputs" else outputs)])

        return keep


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return [value for value in (values if isinstance(values, tuple) else (values,)) if isinstance(value, torch.Tensor)]
