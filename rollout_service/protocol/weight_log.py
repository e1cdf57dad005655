"""Messages about the weight log: its newest version, its files, and the operator's requests to the fleet."""

from pathlib import Path

from rollout_service.protocol.adapters import AdapterVersion
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import PauseMode, SleepTag
from rollout_service.protocol.rollout import OnAbort


class Head(Frozen):
    """A committed version. For the newest one, this is the content of the log's file LATEST."""

    version: int
    digest: str
    mode: PauseMode = "keep"
    """Treatment of running rollouts when replicas load this version."""
    label: str | None = None
    """The trainer's label of the version."""
    rolled_back_at: int | None = None
    """The newest version up to this one that restored older weights. None: no rollback is known."""


class Control(Frozen):
    """The operator's last request to the fleet: the log's file CONTROL."""

    paused: bool = False
    mode: PauseMode = "keep"
    on_abort: OnAbort = "continue"
    """With ``mode="abort"``: treatment of the aborted completions. ``return``: they go back to their callers, whatever
    the callers asked for."""
    clear_cache: bool = True
    """True if a pause drops the KV cache, so that running rollouts compute theirs again."""
    asleep: tuple[SleepTag, ...] = ()
    """Memory that engines have released and were not asked to restore; they wake when this is empty. A sleeping engine
    is paused."""
    order: str = ""
    """Identifies one request; replicas report the last one that they completed. Empty: no request was made yet."""


class Origin(Frozen):
    """Identity of a log and of its writer: the log's file ORIGIN."""

    log: str
    """Identifier created with the log, and kept."""
    writer: str
    """Identifier created by each ingest at its start. A clone of an older state of the log has another one."""


class Newest(Frozen):
    """State of the log for a node that does not have the log."""

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
    """The desired state of every replica. A replica acts when it differs from the last one."""

    version: int
    paused: bool
    pause_mode: PauseMode
    on_abort: OnAbort = "continue"
    """See ``Control.on_abort``."""
    clear_cache: bool = True
    """See ``Control.clear_cache``."""
    asleep: bool = False
    """True if engines should release their memory."""
    order: str = ""
    """See ``Control.order``."""
    digest: str | None = None
    """Digest of that version: the same number may mean other weights, if the log is restored from a backup."""
    origin: Origin | None = None
    """Identity of the log that has the version."""
    label: str | None = None
    """Label of that version."""
    abort: int = 0
    """Number of the abort in progress; 0: none. Unlike a pause it is not in the log."""
    adapters: tuple[AdapterVersion, ...] = ()
    """The adapter versions to hold, oldest first."""
