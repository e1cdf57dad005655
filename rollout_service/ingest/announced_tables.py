"""Tables of tensors that trainers have announced, each kept under a name by which it may be announced again.

A trainer pushes the same tensors at every step. To read the table of a 30B-A3B's 19 000 from JSON, and to compare it
with the model, takes a third of a second; to find it here takes none.
"""

import uuid
from collections.abc import Sequence

from rollout_service.errors import TableUnknown
from rollout_service.protocol.upload import Announcement, AnyAnnouncement, UploadTensor

MOST_KEPT = 4
"""Tables; the one that was used least recently makes room. Of one model there are few: what a trainer sends as it has
it, and what another sends quantized."""

Table = tuple[UploadTensor, ...]


class AnnouncedTables:
    """Those of one ingest, which all fit its model. Not kept over a restart."""

    def __init__(self) -> None:
        self._by_name: dict[str, Table] = {}
        """The one that was used last comes last."""

    def in_full(self, announced: AnyAnnouncement) -> AnyAnnouncement:
        """With its tensors, if it names their table. Raises TableUnknown."""
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
        """Keep a table that fits the model, in place of the one that was used least recently if there are many."""
        if self._name_of(table := tuple(table)) is None:
            for name in list(self._by_name)[: 1 - MOST_KEPT]:
                del self._by_name[name]
            self._by_name[uuid.uuid4().hex] = table

    def are_kept(self, table: Sequence[UploadTensor]) -> bool:
        """Whether this table is known to fit the model."""
        return self._name_of(tuple(table)) is not None

    def name_for(self, announced: Announcement) -> str | None:
        """By which its tensors may be announced again; None: they are not kept, or it has none."""
        return self._name_of(announced.announced_tensors)

    def _name_of(self, table: Table) -> str | None:
        # of the very same tensors, which they are if they were announced by name, this takes no time
        return next((name for name, known in self._by_name.items() if known == table), None) if table else None
