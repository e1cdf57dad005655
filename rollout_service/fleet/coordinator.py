"""The ingest's side of the fleet: what replicas report, what is wanted of them, and who waits for that."""

import asyncio
import logging
import uuid

from rollout_service.config import ServiceConfig
from rollout_service.errors import CommitTimeout, LogCorrupt, NotReady, Overtaken
from rollout_service.fleet.registry import FleetTable
from rollout_service.metrics.state import FleetHistory
from rollout_service.protocol.fleet import Fleet, PauseMode, ReplicaStatus
from rollout_service.protocol.rollout import OnAbort
from rollout_service.protocol.weight_log import Control, DesiredState, Origin
from rollout_service.store.log import WeightLog
from rollout_service.tasks import Changes, ShieldedTasks, Turns

logger = logging.getLogger(__name__)


class FleetCoordinator:
    """Follows every replica and tells each the desired state: the newest version of one log, paused or not."""

    def __init__(self, config: ServiceConfig, log: WeightLog, history: FleetHistory, changes: Changes) -> None:
        """``changes``: woken whenever a replica reported, or what is wanted has changed."""
        self._log, self._history, self._changes = log, history, changes
        self._poll_s = config.weights.poll_s
        self.table = FleetTable(config.weights.dead_after_s, may_be_empty=config.scaling.min_replicas == 0)
        self._desired: DesiredState | None = None
        self._origin: Origin
        self._noted: frozenset[str] = frozenset()
        self._controlling, self._shielded = Turns(), ShieldedTasks()

    def start(self) -> None:
        """Say durably that this process writes the log, and expect who was live before. Raises LogCorrupt, OSError."""
        self._origin = self._log.sign()
        self.table.compare_with(self._log.head(), self._origin.log)
        self._noted = self._log.fleet()
        self.table.wait_for(self._noted)
        self._history.known(self._noted)

    async def close(self) -> None:
        """Take no more pauses; one that is being noted is finished."""
        await self._controlling.close()

    def follow_log(self) -> None:
        """Want of the replicas what the log says now; wakes nobody. Raises LogCorrupt."""
        head, control = self._log.head(), self._log.control()
        if head is None:
            return
        self.table.compare_with(head, self._origin.log)
        self._desired = DesiredState(
            version=head.version,
            paused=control.paused,
            pause_mode=control.mode,
            on_abort=control.on_abort,
            order=control.order,
            digest=head.digest,
            origin=self._origin,
        )

    def require_followed(self) -> None:
        """Raise LogCorrupt if nobody would follow what is written: the log was replaced, or replicas follow another."""
        if (found := self._log.origin()) != self._origin:
            raise LogCorrupt(
                f"the log at {self._log.root} was replaced while this ingest wrote it (ORIGIN is {found}, and was "
                f"{self._origin}): restart the service, so that it reads what is there now"
            )
        if strangers := self.table.strangers():
            raise LogCorrupt(
                f"this ingest writes the log {self._origin.log} at {self._log.root}, but "
                f"{', '.join(status.replica_id for status in strangers)} follow another one "
                f"({strangers[0].log}, at version {strangers[0].version}): bring the ingest back to the node with that "
                "log, see weights.ingest_resources, or restart the service",
                {"log": self._origin.log, "replicas": [status.model_dump(mode="json") for status in strangers]},
            )

    # --- replicas

    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState:
        """A replica's report, and its long poll: answers when what is wanted differs from ``seen``, or after
        ``poll_s``."""
        await self.report(status)
        self._require_desired()
        await self._changes.wait(lambda: self._desired != seen, self._poll_s)
        return self._require_desired()

    async def report(self, status: ReplicaStatus) -> None:
        """A replica's report alone."""
        self.table.report(status)
        await self._changed()

    async def goodbye(self, replica_id: str) -> None:
        """A replica ends: nobody waits for it any more, and it is not in the fleet's table."""
        self.table.leave(replica_id)
        self._history.left(replica_id)
        await self._changed()

    # --- operators and trainers

    async def fleet(self) -> Fleet:
        """The live replicas, those that start included, beside the newest version."""
        desired = self._require_desired()
        return Fleet(
            latest_version=desired.version,
            paused=desired.paused,
            replicas=self.table.live(),
            failed_starts=self.table.starts.failed(),
        )

    def observe(self) -> None:
        """Count who came, failed or went since the last look."""
        if self.table.is_complete():
            self._history.saw(self.table.live())

    async def set_paused(self, paused: bool, mode: PauseMode, timeout_s: float, on_abort: OnAbort = "continue") -> None:
        """Pause or resume every replica, later ones too; returns when all live ones have.

        ``on_abort``: see ``Control``.
        Raises NotReady after ``timeout_s``, or Overtaken once another pause or resume was asked for.
        """
        order = await self._shielded.run(self._set_control(paused, mode, on_abort))
        reached = await self._changes.wait(lambda: self._overtaken(order) or self.table.all_obey(order), timeout_s)
        asked = "paused" if paused else "resumed"
        if self._overtaken(order):
            raise Overtaken(
                f"before every replica was {asked}, something else was asked for, which holds: GET /v1/fleet says what"
            )
        if not reached:
            raise NotReady(
                f"not every replica is {asked} after {timeout_s} s; they go on trying",
                {"replicas": [status.model_dump(mode="json") for status in self.table.live()]},
            )

    async def is_paused(self) -> bool:
        """Whether a pause was asked for and every live replica has obeyed."""
        return self._desired is not None and self._desired.paused and self.table.all_obey(self._desired.order)

    async def wait_served(self, version: int, digest: str | None, timeout_s: float) -> None:
        """Return once every live replica serves ``version`` or newer. Raises CommitTimeout with their table.

        Replicas that start are not waited for: they take no request before they are at the newest version.

        ``digest``: what the log says of the version; None: its number is enough.
        """
        if not await self._changes.wait(lambda: self.table.all_serve(version, digest), timeout_s):
            raise CommitTimeout(
                f"version {version} is committed, but after {timeout_s} s not all replicas serve it; they go on trying",
                {"version": version, "replicas": [s.model_dump(mode="json") for s in self.table.live()]},
            )

    # --- inside

    def _require_desired(self) -> DesiredState:
        if self._desired is None:
            raise NotReady("version 0 is still being made from the model's folder")
        return self._desired

    async def _changed(self) -> None:
        self.observe()
        await self._changes.notify()
        live = frozenset(replica.replica_id for replica in self.table.live())
        if live != self._noted and self.table.is_complete():
            self._noted = live
            await self._shielded.run(self._note_fleet())

    async def _note_fleet(self) -> None:
        async with self._controlling:
            try:
                await asyncio.to_thread(self._log.set_fleet, self._noted)
            except OSError as error:  # only an ingest that starts while this lasts would know less
                logger.warning("could not note which replicas are live: %s", error)

    async def _set_control(self, paused: bool, mode: PauseMode, on_abort: OnAbort) -> str:
        """Note what is asked of the fleet, and wake it. Returns the order, which is the same for the same again."""
        async with self._controlling:
            control = Control(paused=paused, mode=mode, on_abort=on_abort, order=uuid.uuid4().hex)
            known = self._log.control()
            if known.model_copy(update={"order": control.order}) == control:
                control = known
            await asyncio.to_thread(self._log.set_control, control)
            self.follow_log()
            await self._changes.notify()
        return control.order

    def _overtaken(self, order: str) -> bool:
        return self._desired is not None and self._desired.order != order
