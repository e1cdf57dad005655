"""Launches of a Triton kernel that come with every step, without Triton's search for the compiled form.

Triton looks at all arguments of a launch, to find which of a kernel's compiled forms they need: dtypes, alignment of
addresses, numbers that are multiples of 16, constants. With a dozen arguments that is more than half of a launch.
"""

from collections.abc import Hashable
from typing import Any


class RepeatedLaunch:
    """One kernel, whose compiled forms are kept under keys of the caller's."""

    def __init__(self, kernel: Any, num_warps: int) -> None:
        """``kernel``: of ``triton.jit``."""
        self._kernel, self._num_warps = kernel, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, programs: int, key: Hashable, *arguments: Any) -> None:
        """Queue ``programs`` programs.

        Args:
            key: equal only for arguments that Triton compiles alike.
            arguments: all of the kernel's, constants too, in the order of its signature.
        """
        if (compiled := self._compiled.get(key)) is not None:
            compiled[(programs, 1, 1)](*arguments)
            return
        compiled = self._kernel[(programs,)](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled
