"""A table that stays as small as it was told to."""

from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import ROWS_PER_VERSION, Key, VersionTable
from tests.unit.monitor.batches import statistics_of

ONE = statistics_of([[(-1.0, -1.5)]])
TWO = statistics_of([[(-1.0, -1.0), (-2.0, -1.0)]])


def add(table: VersionTable, version: int, replica_id: str = "a", statistics: Statistics = ONE) -> bool:
    return table.add(Key(version, replica_id), statistics) is not None


def test_only_the_newest_versions_are_kept_with_all_replicas():
    table = VersionTable(keep_versions=3)
    for version in range(100_000):
        for replica_id in ("a", "b") if version % 1000 else ("a", f"died-{version}"):
            assert add(table, version, replica_id)
    assert [(row.version, row.replica_id) for row in table.rows()] == [
        (version, replica_id) for version in (99_997, 99_998, 99_999) for replica_id in ("a", "b")
    ]
    assert sum(len(rows) for rows in table._versions.values()) == 6


def test_a_version_that_is_older_than_all_kept_is_not_taken():
    table = VersionTable(keep_versions=2)
    assert add(table, 5) and add(table, 7)
    assert not add(table, 4)
    assert add(table, 6)
    assert [row.version for row in table.rows()] == [6, 7]


def test_reports_are_joined_per_replica():
    table = VersionTable(keep_versions=2)
    add(table, 1, "a", ONE)
    add(table, 1, "b", TWO)
    add(table, 1, "a", TWO)
    assert [(row.replica_id, row.tokens) for row in table.rows()] == [("a", 3), ("b", 2)]


def test_rows_are_merged_per_version_and_not_changed():
    table = VersionTable(keep_versions=2)
    add(table, 1, "a", ONE)
    add(table, 1, "b", TWO)
    for _ in range(2):
        (merged,) = table.merge_replicas()
        assert (merged.replica_id, merged.tokens) == (None, 3)
        assert merged.k1 == (-0.5 + 0.0 + 1.0) / 3
        assert merged.abs_diff_max == 1.0


def test_rows_per_version_are_bounded_and_keep_the_busy_replica():
    table = VersionTable(keep_versions=1)
    for i in range(2 * ROWS_PER_VERSION):
        add(table, 1, f"crashed-{i}")
        add(table, 1, "busy")
    rows = {row.replica_id: row for row in table.rows()}
    assert len(rows) == ROWS_PER_VERSION
    assert rows["busy"].tokens == 2 * ROWS_PER_VERSION
