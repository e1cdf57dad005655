"""A disk that fails, as the ingest meets it."""

import os
from collections.abc import Callable
from typing import Any

import pytest


def fail(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Have a function or method raise ``OSError(number)`` for the arguments ``when`` returns True for."""
    real = getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise OSError(number, os.strerror(number), str(arguments[0]) if arguments else None)
        return real(*arguments, **options)

    patch.setattr(owner, name, failing)


def of(*paths: object) -> Callable[..., bool]:
    """Return a condition for ``fail``: the first argument is one of these paths."""
    return lambda path, *_: str(path) in map(str, paths)
