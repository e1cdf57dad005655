"""Deferred checks of numbers on a GPU: queued for many tensors, and read with one synchronization.

While a thread waits, it cannot queue work.
"""

from collections.abc import Callable

import torch

from rollout_service.gpu.streams import queue_to_host, record_waiter


class DeferredChecks:
    """Deferred checks of one thread, of tensors on any devices."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Callable[[], object]]] = []

    def add(self, is_sound: torch.Tensor, raise_error: Callable[[], object]) -> None:
        """Add a check. ``is_sound``: bool [], computed by the current stream.

        If it is False, ``raise_error`` is called. It searches the tensors again, so it must keep them alive.
        """
        self._pending.append((is_sound, raise_error))

    def collect(self) -> Callable[[], None]:
        """Queue on the current streams the copies to the host of all checks since the last call.

        Return a function that waits for them, and raises the error of the first failed check.
        """
        pending, self._pending = self._pending, []
        by_device: dict[torch.device, list[int]] = {}
        for number, (is_sound, _) in enumerate(pending):
            by_device.setdefault(is_sound.device, []).append(number)
        copies = [
            (numbers, queue_to_host(torch.stack([pending[number][0] for number in numbers])), record_waiter(device))
            for device, numbers in by_device.items()
        ]

        def require() -> None:
            sound = [True] * len(pending)
            for numbers, on_host, wait in copies:
                wait()
                for number, is_sound in zip(numbers, on_host.tolist(), strict=True):
                    sound[number] = is_sound
            for is_sound, (_, raise_error) in zip(sound, pending, strict=True):
                if not is_sound:
                    raise_error()
                    raise RuntimeError(
                        "the GPU's check failed, but no tensor has an invalid number: push again, and report this"
                    )

        return require

    def require(self) -> None:
        """Collect the checks, wait for them, and raise the error of the first failed one."""
        if self._pending:
            self.collect()()
