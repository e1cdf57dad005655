"""Checks of a recipe's bounds when it is created, not in the middle of a training run."""

import math


def require_positive(owner: str, name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a positive number; it may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise ValueError(f"{owner}: {name}={value!r} must be a positive number")


def require_bounds(owner: str, lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless both are positive (``upper`` may be infinite) and ``lower`` ≤ ``upper``; None: no
    bound."""
    for name, value in (("lower", lower), ("upper", upper)):
        if value is not None:
            require_positive(owner, name, value)
    if lower is not None and math.isinf(lower):
        raise ValueError(f"{owner}: lower={lower} leaves nothing: it must be finite")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{owner}: lower={lower} is above upper={upper}: nothing would lie between")


def require_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{owner}: {name}={value!r} must be one of {', '.join(choices)}")
