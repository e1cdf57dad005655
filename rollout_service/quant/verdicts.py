"""Whether numbers on a GPU are what they may be: asked for many tensors, and seen with one wait for all of them.

While a thread waits it queues nothing.
"""

from collections.abc import Callable, Sequence

import torch

from rollout_service.gpu.streams import passed, queued_to_host

_Asked = tuple[torch.Tensor, Callable[[], object]]


class Verdicts:
    """Those of one thread, of tensors on any devices."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []

    def ask(self, is_sound: torch.Tensor, complain: Callable[[], object]) -> None:
        """``is_sound``: bool [], which the current stream computes. ``complain`` raises if it is False, and says why.

        ``complain`` keeps what it looks at until then.
        """
        self._asked.append((is_sound, complain))

    def collect(self) -> Callable[[], None]:
        """Queue on the current streams the copies to the host of all that was asked since the last call.

        What is returned waits for them, and raises what the first complaint raises.
        """
        asked, self._asked = self._asked, []
        by_device: dict[torch.device, list[int]] = {}
        for number, (is_sound, _) in enumerate(asked):
            by_device.setdefault(is_sound.device, []).append(number)
        copies = [
            (numbers, queued_to_host(torch.stack([asked[number][0] for number in numbers])), passed(device))
            for device, numbers in by_device.items()
        ]

        def require() -> None:
            sound = [True] * len(asked)
            for numbers, on_host, wait in copies:
                wait()
                for number, is_sound in zip(numbers, on_host.tolist(), strict=True):
                    sound[number] = is_sound
            _require(asked, sound)

        return require

    def require(self) -> None:
        """``collect``, and what it returns."""
        if self._asked:
            self.collect()()


def _require(asked: Sequence[_Asked], sound: Sequence[bool]) -> None:
    for is_sound, (_, complain) in zip(sound, asked, strict=True):
        if not is_sound:
            complain()
            raise RuntimeError("a GPU found a number that may not be, and did not find it again: report this")
