"""A shell script in the place of a program: see the fixture ``program`` of the unit tests."""

from collections.abc import Callable

Program = Callable[[str, str], None]
"""Makes the script of a name."""
