"""Whether numbers on a GPU are what they may be: asked for many tensors, and seen with one wait for all of them.

While a thread waits it queues nothing.
"""

from collections.abc import Callable

import torch

from rollout_service.gpu_streams import queued_to_host


class Verdicts:
    """Those of one thread."""

    def __init__(self) -> None:
        self._asked: list[tuple[torch.Tensor, Callable[[], object]]] = []
        self._on_host: torch.Tensor | None = None

    def ask(self, is_sound: torch.Tensor, complain: Callable[[], object]) -> None:
        """``is_sound``: bool [], which the current stream computes. ``complain`` raises if it is False, and says why.

        ``complain`` keeps what it looks at until then.
        """
        self._asked.append((is_sound, complain))

    def collect(self) -> None:
        """Queue on the current stream what ``require`` reads."""
        if self._asked:
            self._on_host = queued_to_host(torch.stack([is_sound for is_sound, _ in self._asked]))

    def require(self) -> None:
        """Of all that were asked before ``collect``, once the stream has come so far: raise what the first complaint
        raises."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        assert self._on_host is not None, "collect comes before"
        for is_sound, (_, complain) in zip(self._on_host.tolist(), asked, strict=True):
            if not is_sound:
                complain()
                raise RuntimeError("a GPU found a number that may not be, and did not find it again: report this")
