"""Tensors on the CPU that count as a GPU's: kernels run in Triton's interpreter, and there are no streams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollout_service.quant import quantizer
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.quantizer import Named, Quantized, Quantizer


@contextmanager
def no_stream(gpu: torch.device) -> Iterator[SimpleNamespace]:
    """What stands for a GPU's stream."""
    yield SimpleNamespace(synchronize=lambda: None)


class AsOnGpu:
    """All tensors count as a GPU's for ``modules``, and for the quantizer where its caller checks numbers later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.asked = 0
        """Calls of the quantizer that did not wait."""
        self._quantize = Quantizer.quantize

        def quantize(
            of: Quantizer, weights: Sequence[Named], *, checks: DeferredChecks | None = None, **where: bool
        ) -> list[Quantized]:
            if checks is None:
                return self._quantize(of, weights, **where)
            self.asked += 1
            return of._on_gpu(weights, torch.device("cpu"), to_cpu=False, later=checks)

        for module in modules:
            monkeypatch.setattr(module, "lies_on_gpu", lambda tensor: True)
        monkeypatch.setattr(quantizer, "own_stream", no_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: None)
        monkeypatch.setattr(Quantizer, "quantize", quantize)
