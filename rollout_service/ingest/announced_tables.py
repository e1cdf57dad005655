"""Tables of tensors that trainers have announced. Later announcements may refer to them by name.

A trainer pushes the same tensors at every step. Parsing the 19 000-tensor table of a 30B-A3B and comparing it with the
model takes a third of a second; looking up a name takes no time.
"""

import uuid
from collections.abc import Sequence

from rollout_service.errors import TableUnknown
from rollout_service.protocol.upload import Announcement, AnyAnnouncement, UploadTensor

MOST_KEPT = 4
"""Maximum number of kept tables; the least recently used one is dropped. A model has few: one as the trainer holds it,
and one of a trainer that sends quantized tensors."""

Table = tuple[UploadTensor, ...]


class AnnouncedTables:
    """The announced tables of one ingest, all of which fit its model. Not kept over a restart."""

    def __init__(self) -> None:
        self._by_name: dict[str, Table] = {}
        """Ordered from the least to the most recently used."""

    def in_full(self, announced: AnyAnnouncement) -> AnyAnnouncement:
        """Return the announcement with its tensors, if it refers to a table by name. Raises TableUnknown."""
        if announced.table is None:
            return announced
        table = self._by_name.pop(announced.table, None)
        if table is None:
            raise TableUnknown(
                f"table {announced.table} is not one of the {len(self._by_name)} that are kept here: announce version "
                f"{announced.version} with its tensors",
                {"table": announced.table},
            )
        self._by_name[announced.table] = table
        return announced.with_table(table)

    def keep(self, table: Sequence[UploadTensor]) -> None:
        """Keep a table that fits the model; drop the least recently used one if there are too many."""
        if self._name_of(table := tuple(table)) is None:
            for name in list(self._by_name)[: 1 - MOST_KEPT]:
                del self._by_name[name]
            self._by_name[uuid.uuid4().hex] = table

    def are_kept(self, table: Sequence[UploadTensor]) -> bool:
        """Return True if this table is known to fit the model."""
        return self._name_of(tuple(table)) is not None

    def name_for(self, announced: Announcement) -> str | None:
        """Return the name of the announcement's table; None if the table is not kept, or it has none."""
        return self._name_of(announced.announced_tensors)

    def _name_of(self, table: Table) -> str | None:
        # for a table that was announced by name this is the same object, so comparing takes no time
        return next((name for name, known in self._by_name.items() if known == table), None) if table else None
