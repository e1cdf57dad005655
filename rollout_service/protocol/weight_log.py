"""What processes tell each other of the weight log: its newest version, its files, and what is asked of the fleet."""

from pathlib import Path

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import PauseMode, SleepTag
from rollout_service.protocol.rollout import OnAbort


class Head(Frozen):
    """A committed version; of the newest one, the log's file LATEST."""

    version: int
    digest: str
    mode: PauseMode = "keep"
    """How replicas close for this version."""
    label: str | None = None
    """What its trainer calls it."""


class Control(Frozen):
    """What the operator last asked of the fleet: the log's file CONTROL."""

    paused: bool = False
    mode: PauseMode = "keep"
    on_abort: OnAbort = "continue"
    """With ``mode="abort"``: what becomes of the completions that this pause aborts. ``return``: they go back to their
    callers, whatever those asked for."""
    asleep: tuple[SleepTag, ...] = ()
    """What was not asked back since the engines were put to sleep; they wake when nothing is left of it. An engine that
    sleeps is paused."""
    order: str = ""
    """Tells one of these requests from another; replicas say which they have obeyed. Empty: none was ever made."""


class Origin(Frozen):
    """Which log this is, and who writes it: its file ORIGIN."""

    log: str
    """Made with the log, and kept."""
    writer: str
    """Made anew by each ingest that starts: a clone of an older state of the log has another."""


class Newest(Frozen):
    """What a node without the log must know of it."""

    origin: Origin
    root: Path
    """Folder of the log on the ingest's node."""
    head: Head
    control: Control


class LogFile(Frozen):
    """A file of a committed version."""

    name: str
    nbytes: int


class DesiredState(Frozen):
    """The desired state of every replica. A replica that sees another one than its last acts on it."""

    version: int
    paused: bool
    pause_mode: PauseMode
    on_abort: OnAbort = "continue"
    """See ``Control.on_abort``."""
    asleep: bool = False
    """Whether engines give their memory back."""
    order: str = ""
    """See ``Control.order``."""
    digest: str | None = None
    """Of that version: the same number may come to mean other weights, if the log is restored from a backup."""
    origin: Origin | None = None
    """Of the log that the version is in."""
    label: str | None = None
    """Of that version."""
    abort: int = 0
    """Number of the abort that is under way; 0: none is. Unlike a pause it is not in the log."""
