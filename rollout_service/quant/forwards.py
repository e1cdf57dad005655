"""Forward passes of single modules, in place of those of their classes for a while."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Forwards:
    """Modules with other forward passes, until ``remove()``."""

    def __init__(self, forwards: Mapping[nn.Module, Forward]) -> None:
        self._ours = dict(forwards)
        self._before = {module: vars(module).get("forward") for module in forwards}
        for module, forward in forwards.items():
            module.forward = forward  # an attribute of its own, which hides the method

    def remove(self) -> None:
        """The modules compute as they did before, also by a forward that others had given them; again does no harm.

        Raises RuntimeError, and removes none, if a module has got yet another forward since.
        """
        for module, forward in self._ours.items():
            if vars(module).get("forward") is not forward:
                raise RuntimeError(
                    f"a {type(module).__name__} has got another forward since, which may call ours: remove that first"
                )
        for module in self._ours:
            before = self._before[module]
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._ours, self._before = {}, {}
