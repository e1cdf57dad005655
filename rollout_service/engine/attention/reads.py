"""Tokens of the KV cache that decode attends to, and those of them that grouping spares it to read; on the GPU.

The grouping kernels add to a counter in the GPU's memory. Whoever asks gets the copy that was queued when it was asked
before, so that nobody waits for the GPU.
"""

import torch


class KVReads:
    """A counter of one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: torch.Tensor | None = None
        self._copy = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._last = (0, 0)

    @property
    def counts(self) -> torch.Tensor:
        """int64 [2], on the device: tokens attended to, and those of them that were not read; of one layer.

        Made when a batch is grouped first: what is made before, with the KV cache, is gone while the engine sleeps.
        """
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        return self._counts

    def seen(self) -> tuple[int, int]:
        """``counts`` as they were when this was called before; zeros the first time."""
        if self._copied is not None and not self._copied.query():
            return self._last  # the GPU has steps to finish before it copies
        attended, spared = self._copy.tolist()
        self._last = (attended, spared)
        if self._counts is not None:
            with torch.inference_mode():  # in which vLLM may have made both, and outside of which it is not allowed
                self._copy.copy_(self._counts, non_blocking=True)
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        return self._last
