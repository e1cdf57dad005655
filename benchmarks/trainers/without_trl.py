"""Hides TRL from verl 0.9.1, which asks an installed one for a class that TRL 1.16 does not have.

verl imports this module in each of its processes: ``VERL_USE_EXTERNAL_MODULES``.
"""

import sys

sys.modules["trl"] = None  # type: ignore[assignment]  # find_spec says then that it is not installed
