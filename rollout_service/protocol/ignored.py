"""Tensors that a checkpoint or a trainer may send and that no version stores. Needs neither torch nor transformers."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from rollout_service.protocol.base import Frozen

IGNORED_BYTES = 512 << 20
"""Maximum size in bytes of a tensor that is left out, if the served model has no larger one itself."""


class IgnoredTensors(Frozen):
    """Names that the served model's class leaves out when it loads, such as those of a next-token layer (MTP)."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, searched for in a tensor's name."""
    kept: tuple[str, ...] = ()
    """Tensors of the model that are stored although a pattern matches them."""

    def __contains__(self, name: str) -> bool:
        """Return True if the tensor of that name is left out."""
        return self.pattern_of(name) is not None

    def pattern_of(self, name: str) -> str | None:
        """Return the pattern by which a tensor is left out, or None if the tensor is not left out."""
        if self._any is None or self._any.search(name) is None or name in self._kept:
            return None
        return next(pattern for pattern in self.patterns if re.search(pattern, name))

    def may_have(self, name: str, nbytes: int, largest_bytes: int) -> bool:
        """Return True if a tensor may have ``nbytes``. ``largest_bytes``: size of the served model's largest tensor."""
        return nbytes <= largest_bytes or (nbytes <= IGNORED_BYTES and name in self)

    def summary(self, names: Iterable[str]) -> str:
        """Return the number of ``names`` that are left out, by pattern, as a sentence; empty if none is."""
        found = Counter(pattern for name in names if (pattern := self.pattern_of(name)) is not None)
        if not found:
            return ""
        patterns = ", ".join(f"{count} × {pattern}" for pattern, count in found.items())
        return f"{found.total()} tensors are left out, since the model's class ignores them ({patterns})"

    @cached_property
    def _any(self) -> re.Pattern[str] | None:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.patterns)) if self.patterns else None

    @cached_property
    def _kept(self) -> frozenset[str]:
        return frozenset(self.kept)


NOTHING_IGNORED = IgnoredTensors()
"""Leaves out nothing."""
