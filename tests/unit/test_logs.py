"""Log lines of this package go where Serve's do."""

import logging
from collections.abc import Iterator

import pytest

from rollout_service.logs import log_with_serve


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def serves() -> Iterator[Kept]:
    """Serve's logger as it is in a replica; both loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in ("ray.serve", "rollout_service")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    kept = Kept()
    loggers[0].handlers, loggers[0].propagate = [kept], False
    yield kept
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, ["told"]), (logging.WARNING, [])])
def test_lines_from_serves_level_on_are_shown_once(serves: Kept, level: int, shown: list[str]) -> None:
    logging.getLogger("ray.serve").setLevel(level)
    log_with_serve()
    log_with_serve()
    logging.getLogger("rollout_service.engine.follower").info("told")
    assert serves.messages == shown
