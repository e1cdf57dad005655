"""Counter of the KV cache tokens that decode steps attend to, and of those that grouping saves, kept on the GPU.

The grouping kernels add to a counter in GPU memory. A reader gets the copy that the previous read queued, so that it
never waits for the GPU.
"""

import torch


class KVReads:
    """The counter of one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: torch.Tensor | None = None
        self._copy = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._last = (0, 0)

    @property
    def counts(self) -> torch.Tensor:
        """int64 [2] on the device: tokens attended to, and tokens saved by grouping; for one layer.

        Allocated with the first grouped batch. Memory allocated earlier belongs to the KV cache and is freed while the
        engine sleeps.
        """
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        return self._counts

    def read(self) -> tuple[int, int]:
        """Return ``counts`` as of the previous call; zeros at the first call."""
        if self._copied is not None and not self._copied.query():
            return self._last  # the GPU has not reached the copy yet
        attended, spared = self._copy.tolist()
        self._last = (attended, spared)
        if self._counts is not None:
            # vLLM may have created both in inference mode, and torch forbids the copy outside of it
            with torch.inference_mode():
                self._copy.copy_(self._counts, non_blocking=True)
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        return self._last
