"""Statistics per (version, replica), of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_service.monitor.statistics import Statistics, Sums
from rollout_service.protocol.mismatch import MismatchRow, NotJudged, Suspicion

ROWS_PER_VERSION = 512
"""Maximum number of rows of a version; the least recently used row is dropped. Replicas that crash and restart have new
names."""


class Key(NamedTuple):
    """Version, replica and adapter of a row's tokens."""

    version: int
    replica_id: str
    adapter: str | None = None
    """The adapter that sampled them with that version of the model; None: none."""
    adapter_version: int | None = None


@dataclass
class Entry:
    """One row."""

    statistics: Statistics = field(default_factory=Statistics)
    suspect_since: float | None = None
    """Unix time in seconds."""
    truncated_tokens: int = 0
    """Number of tokens of truncated rollouts, which are in no statistic; a row may have only these."""


class VersionTable:
    """Holds the newest ``keep_versions`` reported versions; older ones are dropped, with all their replicas."""

    def __init__(self, keep_versions: int) -> None:
        self._keep_versions = keep_versions
        self._versions: dict[int, dict[Key, Entry]] = {}

    def is_too_old(self, version: int) -> bool:
        """Return True if ``version`` is older than all kept ones and the table is full."""
        return len(self._versions) >= self._keep_versions and version < min(self._versions)

    def clear(self) -> None:
        """Drop all versions."""
        self._versions.clear()

    def add(self, key: Key, statistics: Statistics) -> Entry | None:
        """Merge into the row of ``key`` and return it, or None if its version is older than all kept ones."""
        entry = self._entry(key)
        if entry is not None:
            entry.statistics.merge(statistics)
        return entry

    def add_truncated(self, key: Key, tokens: int) -> None:
        """Count tokens separately from the statistics of ``key``."""
        entry = self._entry(key)
        if entry is not None:
            entry.truncated_tokens += tokens

    def _entry(self, key: Key) -> Entry | None:
        if self.is_too_old(key.version):
            return None
        if key.version not in self._versions:
            if len(self._versions) >= self._keep_versions:
                del self._versions[min(self._versions)]
            self._versions[key.version] = {}
        rows = self._versions[key.version]
        entry = rows.pop(key, None) or Entry()
        rows[key] = entry  # moved to the end: the first row is the least recently used
        if len(rows) > ROWS_PER_VERSION:
            del rows[next(iter(rows))]
        return entry

    def rows(self, wanted: Callable[[Key], bool] = lambda _: True) -> list[MismatchRow]:
        """Return one row per selected key, oldest version first."""
        return [
            entry.statistics.row(**key._asdict(), suspect_since=entry.suspect_since)
            for key, entry in _sorted(self._entries())
            if wanted(key) and entry.statistics.sums.tokens
        ]

    def truncated(self, wanted: Callable[[Key], bool] = lambda _: True) -> list[NotJudged]:
        """Return the separately counted tokens of the selected keys, oldest version first."""
        return [
            NotJudged(**key._asdict(), tokens=entry.truncated_tokens)
            for key, entry in _sorted(self._entries())
            if wanted(key) and entry.truncated_tokens
        ]

    def by_kv_age(self, since: int) -> dict[int, Sums]:
        """Return the sums of the tokens of ``since`` and newer versions, by the age of their keys and values."""
        found: dict[int, Sums] = {}
        for key, entry in self._entries():
            if key.version >= since:
                for age, sums in entry.statistics.by_age.items():
                    found[age] = found.get(age, Sums()) + sums
        return found

    def suspicions(self) -> dict[int, tuple[Suspicion, ...]]:
        """Return the suspicions by version."""
        suspect: dict[int, tuple[Suspicion, ...]] = {}
        for key, entry in self._entries():
            if entry.suspect_since is not None:
                sums = entry.statistics.sums
                suspicion = Suspicion(
                    replica_id=key.replica_id,
                    adapter=key.adapter,
                    adapter_version=key.adapter_version,
                    since=entry.suspect_since,
                    tokens=sums.tokens,
                    k3=sums.mean_k3,
                    prob_error=sums.mean_prob_error,
                )
                suspect[key.version] = (*suspect.get(key.version, ()), suspicion)
        return suspect

    def merge_replicas(self, wanted: Callable[[Key], bool] = lambda _: True) -> list[MismatchRow]:
        """Return one row per version and adapter, merged over all selected replicas (``replica_id`` None), oldest
        first."""
        joined: dict[Key, Entry] = {}
        for key, entry in self._entries():
            if wanted(key) and entry.statistics.sums.tokens:
                into = joined.setdefault(key._replace(replica_id=""), Entry())
                into.statistics.merge(entry.statistics)
                since = [at for at in (into.suspect_since, entry.suspect_since) if at is not None]
                into.suspect_since = min(since, default=None)
        return [
            entry.statistics.row(**key._asdict() | {"replica_id": None}, suspect_since=entry.suspect_since)
            for key, entry in _sorted(joined.items())
        ]

    def _entries(self) -> Iterator[tuple[Key, Entry]]:
        for rows in self._versions.values():
            yield from rows.items()


def _sorted(entries: Iterable[tuple[Key, Entry]]) -> list[tuple[Key, Entry]]:
    def order(item: tuple[Key, Entry]) -> tuple[int, str, int, str]:
        key, _ = item
        return key.version, key.adapter or "", key.adapter_version or 0, key.replica_id

    return sorted(entries, key=order)
