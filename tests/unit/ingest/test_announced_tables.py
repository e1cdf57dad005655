import pytest

from rollout_service.errors import TableUnknown
from rollout_service.ingest.uploads import MOST_TABLES, AnnouncedTables
from rollout_service.protocol.upload import Announcement, SharedMemorySource, UploadTensor
from tests.unit.ingest.trainer import begin_of, started


def table(*names: str) -> tuple[UploadTensor, ...]:
    return tuple(UploadTensor(name=name, dtype="bfloat16", shape=(2, 3)) for name in names)


def shared(tensors: tuple[UploadTensor, ...] = ()) -> SharedMemorySource:
    return SharedMemorySource(
        transfer="a" * 32, machine="here", process=1, descriptor=3, memory="b" * 32, tensors=tensors
    )


def test_what_is_announced_by_name_has_the_tensors():
    tables = AnnouncedTables()
    for kept in (table("a", "b"), table("a", "b"), table("a")):
        tables.keep(kept)
    name = tables.name_of(table("a", "b"))
    assert name is not None and tables.name_of(table("a")) not in (None, name) and tables.name_of(table("b")) is None
    for announced in (
        Announcement(version=1, tensors=table("a", "b")),
        Announcement(version=1, source=shared(table("a", "b"))),
    ):
        short = announced.by_table(name)
        assert not short.announced_tensors
        assert tables.in_full(Announcement.model_validate_json(short.model_dump_json())) == announced


def test_the_one_that_was_used_least_recently_makes_room():
    tables = AnnouncedTables()
    for number in range(MOST_TABLES):
        tables.keep(table(f"t{number}"))
    first, second = (tables.name_of(table(f"t{number}")) for number in range(2))
    tables.in_full(Announcement(version=2, table=first))
    tables.keep(table("another"))
    tables.in_full(Announcement(version=3, table=first))
    with pytest.raises(TableUnknown, match=rf"table {second} is not one of the {MOST_TABLES} .* version 3 with its"):
        tables.in_full(Announcement(version=3, table=second))


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ({"tensors": table("a"), "table": "name"}, "not both"),
        ({"source": shared(table("a")), "table": "name"}, "not both"),
        ({"source": {"path": "/tmp"}, "table": "name"}, "not those of a source"),
        ({"source": shared()}, "source.tensors is empty"),
        ({}, "not neither"),
    ],
)
def test_an_announcement_that_contradicts_itself_is_refused(what, complaint):
    with pytest.raises(ValueError, match=complaint):
        Announcement.model_validate({"version": 1, **what})


async def test_a_table_outlives_its_version_and_not_the_ingest(config, weights):
    async with started(config) as ingest:
        begin = begin_of(1, weights)
        plan = await ingest.begin(begin)
        assert plan.table is not None
        assert await ingest.begin(begin.by_table(plan.table)) == plan
        await ingest.discard(1)
        later = await ingest.begin(begin_of(2, weights).by_table(plan.table))
        assert (later.version, later.num_parts, later.table) == (2, plan.num_parts, plan.table)
    async with started(config) as ingest:
        with pytest.raises(TableUnknown):
            await ingest.begin(begin_of(3, weights).by_table(plan.table))
