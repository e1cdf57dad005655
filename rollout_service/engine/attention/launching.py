"""Repeated launches of a Triton kernel, without Triton's search for the compiled variant.

For each launch, Triton inspects all arguments to find the compiled variant: dtypes, address alignment, multiples of 16,
constants. With a dozen arguments that takes more than half of the launch time.
"""

from collections.abc import Hashable
from typing import Any


class RepeatedLaunch:
    """One kernel, with its compiled variants cached under the caller's keys."""

    def __init__(self, kernel: Any, num_warps: int) -> None:
        """Wrap ``kernel``, a function decorated with ``triton.jit``."""
        self._kernel, self._num_warps = kernel, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, programs: int, key: Hashable, *arguments: Any) -> None:
        """Queue ``programs`` programs.

        Args:
            key: equal only for arguments that Triton compiles alike.
            arguments: all arguments of the kernel in signature order, including constants.
        """
        if (compiled := self._compiled.get(key)) is not None:
            compiled[(programs, 1, 1)](*arguments)
            return
        compiled = self._kernel[(programs,)](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled
