"""Checks of a recipe's bounds when it is created, not in the middle of a training run."""

import math
from numbers import Real


def require_positive(owner: str, name: str, value: object, *, is_finite: bool = False) -> None:
    """Raise ValueError unless ``value`` is a positive number, of any library; ``is_finite``: and not infinite."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{owner}: {name}={value!r} must be a positive number")
    if is_finite and math.isinf(value):
        raise ValueError(f"{owner}: {name}={value} must be finite")


def require_bounds(owner: str, lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless both are positive (``upper`` may be infinite) and ``lower`` ≤ ``upper``; None: no
    bound."""
    if lower is not None:
        require_positive(owner, "lower", lower, is_finite=True)
    if upper is not None:
        require_positive(owner, "upper", upper)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{owner}: lower={lower} is above upper={upper}: nothing would lie between")


def require_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{owner}: {name}={value!r} must be one of {', '.join(choices)}")
