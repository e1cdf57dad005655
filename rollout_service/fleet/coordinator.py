"""The ingest's side of the fleet: replicas' reports, their desired state, and callers that wait for it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection
from typing import get_args

from rollout_service.config import ServiceConfig
from rollout_service.errors import Asleep, CommitTimeout, ControlTimeout, LogCorrupt, NotReady, Overtaken
from rollout_service.fleet.registry import FleetTable
from rollout_service.metrics.state import FleetHistory
from rollout_service.protocol.adapters import AdapterVersion
from rollout_service.protocol.fleet import Fleet, LogPlace, PauseMode, Pin, ReplicaStatus, SleepTag
from rollout_service.protocol.rollout import OnAbort
from rollout_service.protocol.weight_log import Control, DesiredState, Head, Origin
from rollout_service.runtime.tasks import ChangeNotifier, ClosableLock, ShieldedTasks
from rollout_service.store.durable_io import DISK_FULL, no_room, not_written
from rollout_service.store.log import WeightLog

logger = logging.getLogger(__name__)

SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)


class FleetCoordinator:
    """Collects the reports of all replicas and sends them the desired state: the newest version of one log, paused or
    not, asleep or not."""

    def __init__(
        self,
        config: ServiceConfig,
        log: WeightLog,
        history: FleetHistory,
        changes: ChangeNotifier,
        place: LogPlace | None = None,
        pins: Callable[[], dict[str, Pin]] = dict,
        adapters: Callable[[], tuple[AdapterVersion, ...]] = tuple,
    ) -> None:
        """``changes``: notified of reports, and of each change of the desired state. ``place``: location of the log.
        ``pins``: returns the versions of pinned groups. ``adapters``: returns the adapter versions to hold."""
        self._place, self._pins, self._adapters = place, pins, adapters
        self._log, self._history, self._changes = log, history, changes
        self._poll_s = config.weights.poll_s
        self.table = FleetTable(config.weights.dead_after_s, may_be_empty=config.scaling.min_replicas == 0)
        self._desired: DesiredState | None = None
        self._head: Head | None = None
        self._control = Control()
        self._abort = 0
        """Number of the last abort."""
        self._brief_pause: str | None = None
        """Order of the pause in which replicas drop their KV cache; None: there is none."""
        self._dropping = asyncio.Lock()
        self._origin: Origin
        self._noted: frozenset[str] = frozenset()
        self._controlling, self._shielded = ClosableLock(), ShieldedTasks()

    def start(self) -> None:
        """Record durably that this process writes the log, and expect the previously live replicas. Raises LogCorrupt,
        OSError."""
        self._origin = self._log.sign()
        self.table.compare_with(self._log.head(), self._origin.log)
        self._control = self._log.control()
        self._noted = self._log.fleet()
        self.table.wait_for(self._noted)
        self._history.add_known(self._noted)

    async def close(self) -> None:
        """Accept no more requests; finish a running write to the log."""
        await self._controlling.close()

    def follow_log(self) -> None:
        """Set the desired state from the log; notifies no waiter. Raises LogCorrupt, LogUnreadable."""
        head = self._log.head()
        if head is not None:
            self.follow(head)

    def follow(self, head: Head) -> None:
        """Set the desired state to the newest version and the operator's last request; notifies no waiter."""
        self._head, control = head, self._control
        if self._brief_pause is not None and not control.paused:
            control = Control(paused=True, order=self._brief_pause)
        self.table.compare_with(head, self._origin.log)
        self._desired = DesiredState(
            version=head.version,
            paused=control.paused,
            pause_mode=control.mode,
            on_abort=control.on_abort,
            clear_cache=control.clear_cache,
            asleep=bool(control.asleep),
            order=control.order,
            digest=head.digest,
            origin=self._origin,
            label=head.label,
            abort=0 if self._desired is None else self._desired.abort,
            adapters=self._adapters(),
        )

    async def follow_adapters(self) -> None:
        """Have replicas hold the adapter versions that are committed now."""
        await self._announce()

    def require_followed(self) -> None:
        """Raise LogCorrupt if the log was replaced, or replicas follow another log, so that a commit would have no
        effect."""
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
        """Handle a replica's report and long poll: return when the desired state differs from ``seen``, or after
        ``poll_s``."""
        await self.report(status)
        self._require_desired()
        await self._changes.wait(lambda: self._desired != seen, self._poll_s)
        return self._require_desired()

    async def report(self, status: ReplicaStatus) -> None:
        """Handle a replica's report without a poll."""
        self.table.report(status)
        await self._changed()

    async def goodbye(self, replica_id: str) -> None:
        """Remove a replica that ends from the table, so that callers do not wait for it."""
        self.table.leave(replica_id)
        self._history.note_left(replica_id)
        await self._changed()

    # --- operators and trainers

    async def fleet(self) -> Fleet:
        """Return the live replicas, including starting ones, and the newest version."""
        desired = self._require_desired()
        return Fleet(
            latest_version=desired.version,
            latest_label=desired.label,
            paused=desired.paused,
            asleep=desired.asleep,
            replicas=self.table.live(),
            groups=self._pins(),
            failed_starts=self.table.failed_starts,
            log=self._place,
        )

    def observe(self) -> None:
        """Count replicas that started, failed or left since the last call."""
        if self.table.is_complete():
            self._history.saw(self.table.live())

    async def set_paused(
        self,
        paused: bool,
        mode: PauseMode,
        timeout_s: float,
        on_abort: OnAbort = "continue",
        clear_cache: bool = True,
    ) -> None:
        """Pause or resume every replica, including later ones; returns once all live ones have.

        ``on_abort``, ``clear_cache``: see ``Control``. Sleeping engines are paused. Raises ControlTimeout after
        ``timeout_s``, Overtaken after a different request, or Asleep for resuming engines that are asleep.
        """

        def changed(control: Control) -> Control:
            if not control.asleep:
                return Control(paused=paused, mode=mode, on_abort=on_abort, clear_cache=clear_cache)
            if not paused:
                raise Asleep("the engines are asleep, and have no weights to go on with: POST /wake_up instead")
            return control

        await self._all_obey(changed, "paused" if paused else "resumed", timeout_s)

    async def drop_kv_cache(self, timeout_s: float) -> None:
        """Make every replica drop its KV cache, so that running rollouts recompute theirs; returns once all live ones
        have.

        Engines that are not paused are paused and resumed. That pause ends with this call, and the log does not note
        it. A pause would also end a version's wait for running rollouts, so such a version is live first. Raises the
        errors of ``set_paused``.
        """
        self._require_desired()
        async with self._dropping:
            if not await self._changes.wait(self._waits_for_no_rollouts, timeout_s):
                raise NotReady(
                    f"no KV cache is dropped: version {self._require_desired().version} waits for rollouts, and "
                    f"not all replicas serve it after {timeout_s} s; send it again",
                    {"replicas": [status.model_dump(mode="json") for status in self.table.live()]},
                )
            if self._control.paused:
                cleared = {"clear_cache": True}
                await self._all_obey(lambda control: control.model_copy(update=cleared), "cleared", timeout_s)
                return
            order = uuid.uuid4().hex
            try:
                await self._pause_briefly(order)
                await self._until_obeyed(order, "cleared", timeout_s)
            finally:
                await self._pause_briefly(None)
            await self._until_obeyed(self._control.order, "resumed", timeout_s)

    async def abort_running(self, timeout_s: float) -> None:
        """Make every replica abort and return what it runs; returns once all live ones have. Nothing is paused.

        The request ends with this call, since a replica that obeyed later would abort newer rollouts. Raises NotReady
        after ``timeout_s``.
        """
        self._require_desired()
        # larger than the numbers of a previous ingest, even if the clock went back
        aborted = (status.aborted for status in self.table.live())
        number = self._abort = max(time.time_ns(), 1 + max(aborted, default=0), self._abort + 1)
        await self._want_abort(number)
        try:
            if not await self._changes.wait(lambda: self.table.all_aborted(number), timeout_s):
                raise NotReady(
                    f"not every replica has aborted what it ran after {timeout_s} s; nothing is paused: send it again",
                    {"replicas": [status.model_dump(mode="json") for status in self.table.live()]},
                )
        finally:
            if self._abort == number:
                await self._want_abort(0)

    async def sleep(self, mode: PauseMode, timeout_s: float) -> None:
        """Make every replica release its engine's memory, after treating running rollouts by ``mode``.

        Returns once all live ones have. Raises the errors of ``set_paused``.
        """
        await self._all_obey(lambda _: Control(paused=True, mode=mode, asleep=SLEEP_TAGS), "asleep", timeout_s)

    async def wake_up(self, tags: Collection[SleepTag], timeout_s: float) -> bool:
        """Restore memory of engines. Once all of it is restored, the engines wake, load the newest version and resume.

        Returns once all live engines have; True if they are awake. Has no effect on engines that are awake. Raises the
        errors of ``set_paused``.
        """
        left = SLEEP_TAGS

        def changed(control: Control) -> Control:
            nonlocal left
            left = tuple(tag for tag in control.asleep if tag not in tags)
            if not control.asleep:
                return control
            return control.model_copy(update={"asleep": left}) if left else Control()

        await self._all_obey(changed, "awake", timeout_s)
        return not left

    async def is_sleeping(self) -> bool:
        """Return True if the engines were put to sleep, and every live one is asleep."""
        return self._desired is not None and self._desired.asleep and self._is_obeyed(self._desired.order)

    async def until_awake(self) -> bool:
        """Return True if engines may allocate memory; waits for that for ``poll_s`` at most."""
        return await self._changes.wait(lambda: self._desired is None or not self._desired.asleep, self._poll_s)

    async def is_paused(self) -> bool:
        """Return True if a pause was requested and every live replica is paused."""
        return self._desired is not None and self._desired.paused and self.table.all_obey(self._desired.order)

    async def wait_served(self, version: int, digest: str | None, timeout_s: float) -> None:
        """Return once every live replica serves ``version`` or newer. Raises CommitTimeout with their table.

        It does not wait for replicas that hold no version yet: they take no request before they have loaded the newest
        one. Nor does it wait for sleeping ones, which load it when they wake.

        ``digest``: the version's digest in the log; None: only numbers are compared.
        """

        def served() -> bool:
            return self._require_desired().asleep or self.table.all_serve(version, digest)

        if not await self._changes.wait(served, timeout_s):
            raise CommitTimeout(
                f"version {version} is committed, but after {timeout_s} s not all replicas serve it; they go on trying",
                {"version": version, "replicas": [s.model_dump(mode="json") for s in self.table.live()]},
            )

    async def wait_adapter(self, adapter: AdapterVersion, timeout_s: float) -> None:
        """Return once every live replica holds an adapter version. Sleeping replicas load it when they wake.

        Raises LogCorrupt if a replica cannot load it, or CommitTimeout with the table of replicas.
        """

        def errors() -> dict[str, str]:
            found = {name: held.error for name, held in self.table.adapter(adapter).items() if held is not None}
            return {name: error for name, error in found.items() if error is not None}

        def is_held() -> bool:
            reports = self.table.adapter(adapter)
            if self._require_desired().asleep or adapter not in self._adapters():  # a newer one has taken its place
                return True
            has_replicas = bool(reports) or self.table.may_be_empty
            return self.table.is_complete() and has_replicas and None not in reports.values()

        is_known = await self._changes.wait(lambda: bool(errors()) or is_held(), timeout_s)
        if failed := errors():
            name, why = next(iter(failed.items()))
            raise LogCorrupt(
                f"adapter {adapter} is committed, and {len(failed)} replicas cannot load it, among them {name}: {why}. "
                "They go on with the version before: push another one",
                {"adapter": str(adapter), "errors": failed},
            )
        if not is_known:
            raise CommitTimeout(
                f"adapter {adapter} is committed, but after {timeout_s} s not all replicas hold it. If they have no "
                "free place until rollouts of older versions end, raise engine.adapters.max_live",
                {"adapter": str(adapter), "replicas": [s.model_dump(mode="json") for s in self.table.live()]},
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
            except OSError as error:  # only an ingest that restarts now would miss it
                logger.warning("could not note which replicas are live: %s", error)

    async def _all_obey(self, changed: Callable[[Control], Control], asked: str, timeout_s: float) -> None:
        """Change the request to the fleet; returns once all live replicas are ``asked``, a word for messages."""
        await self._until_obeyed(await self._shielded.run(self._set_control(changed)), asked, timeout_s)

    async def _until_obeyed(self, order: str, asked: str, timeout_s: float) -> None:
        reached = await self._changes.wait(lambda: self._overtaken(order) or self._is_obeyed(order), timeout_s)
        if self._overtaken(order):
            raise Overtaken(
                f"before every replica was {asked}, something else was asked for, which holds: GET /v1/fleet says what"
            )
        if not reached:
            raise ControlTimeout(
                f"not every replica is {asked} after {timeout_s} s; they go on trying",
                {"replicas": [status.model_dump(mode="json") for status in self.table.live()]},
            )

    async def _set_control(self, changed: Callable[[Control], Control]) -> str:
        """Record the request to the fleet in the log, and notify replicas. Return its order; an unchanged request has
        the same.

        ``changed``: computes the new request from the previous one.
        """
        async with self._controlling:
            known = self._control
            control = changed(known).model_copy(update={"order": known.order})
            if control != known:
                control = control.model_copy(update={"order": uuid.uuid4().hex})
            try:
                await asyncio.to_thread(self._log.set_control, control)
            except OSError as error:
                if control != known:
                    await asyncio.to_thread(self._require_may_go_on, known, control, error)
            self._control = control
            await self._announce()
        return control.order

    def _require_may_go_on(self, known: Control, control: Control, error: OSError) -> None:
        """Raise InsufficientStorage or RolloutServiceError for a pause or sleep that could not be recorded in the log.

        A resume takes effect even if the disk fails: otherwise the engines could not be resumed at all.
        """
        if control.paused and not set(control.asleep) < set(known.asleep):
            what = "what is asked of the fleet"
            if error.errno in DISK_FULL:
                raise no_room(f"{what}, which is not changed,", self._log.root, 1 << 10) from error
            raise not_written(f"{what} is not changed", error, "send the call again") from error
        try:
            if not control.paused:
                self._log.clear_control()  # needs no disk space, and has the same meaning
                return
        except OSError as also:
            error = also
        logger.error(
            "the engines go on, which could not be noted in %s (%s): an ingest that restarts pauses them again",
            self._log.root, error,
        )  # fmt: skip

    async def _pause_briefly(self, order: str | None) -> None:
        self._brief_pause = order
        await self._announce()

    async def _announce(self) -> None:
        """Renew the desired state, and notify replicas."""
        if self._head is not None:
            self.follow(self._head)
        await self._changes.notify()

    async def _want_abort(self, number: int) -> None:
        self._desired = self._require_desired().model_copy(update={"abort": number})
        await self._changes.notify()

    def _waits_for_no_rollouts(self) -> bool:
        """Return True unless a replica may be waiting for running rollouts in order to load the newest version."""
        head = self._head
        is_loaded = head is None or head.mode != "wait" or self.table.all_serve(head.version, head.digest)
        return is_loaded or bool(self._control.asleep)

    def _is_obeyed(self, order: str) -> bool:
        return self.table.all_obey(order, asleep=bool(self._control.asleep))

    def _overtaken(self, order: str) -> bool:
        """Return True if replicas will not obey that order any more. They obey that of ``Control`` after a brief
        pause."""
        return self._desired is not None and order not in (self._desired.order, self._control.order)
