"""Temporarily replace the forward passes of single modules."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Forwards:
    """Modules with replaced forward passes, until ``remove()``."""

    def __init__(self, forwards: Mapping[nn.Module, Forward]) -> None:
        self._ours = dict(forwards)
        self._before = {module: vars(module).get("forward") for module in forwards}
        for module, forward in forwards.items():
            module.forward = forward  # an instance attribute, which hides the method

    def remove(self) -> None:
        """Restore the previous forward passes, including ones set by other code; may be called again.

        Raises RuntimeError, and restores none, if a module's forward has been replaced again since.
        """
        for module, forward in self._ours.items():
            if vars(module).get("forward") is not forward:
                raise RuntimeError(
                    f"the forward of a {type(module).__name__} was replaced again and may call ours: undo that first"
                )
        for module in self._ours:
            before = self._before[module]
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._ours, self._before = {}, {}
