"""What the ingest tells replicas to follow, and that they follow the log which it writes."""

from rollout_service.errors import LogCorrupt
from rollout_service.fleet.registry import FleetTable
from rollout_service.protocol.weight_log import DesiredState, Origin
from rollout_service.store.log import WeightLog


class Guide:
    """Names the newest version of one log. ``sign`` comes first."""

    def __init__(self, log: WeightLog, fleet: FleetTable) -> None:
        self._log, self._fleet = log, fleet
        self._origin: Origin

    def sign(self) -> None:
        """Say durably that this process writes the log. Raises LogCorrupt or OSError."""
        self._origin = self._log.sign()
        self._fleet.compare_with(self._log.head(), self._origin.log)

    def wish(self) -> DesiredState | None:
        """What replicas should be like, as the log says; None in an empty log. Raises LogCorrupt."""
        head, control = self._log.head(), self._log.control()
        if head is None:
            return None
        self._fleet.compare_with(head, self._origin.log)
        return DesiredState(
            version=head.version,
            paused=control.paused,
            pause_mode=control.mode,
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
        if strangers := self._fleet.strangers():
            raise LogCorrupt(
                f"this ingest writes the log {self._origin.log} at {self._log.root}, but "
                f"{', '.join(status.replica_id for status in strangers)} follow another one "
                f"({strangers[0].log}, at version {strangers[0].version}): bring the ingest back to the node with that "
                "log, see weights.ingest_resources, or restart the service",
                {"log": self._origin.log, "replicas": [status.model_dump(mode="json") for status in strangers]},
            )
