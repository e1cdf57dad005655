from pathlib import Path

import pytest

from rollout_service.errors import InvalidManifest, TableUnknown
from rollout_service.ingest.announced_tables import MOST_KEPT, AnnouncedTables
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import (
    Announcement,
    BeginUpload,
    SharedMemorySource,
    UploadTensor,
)
from tests.unit.ingest.trainer import Weights, begin_of, config_of, started


def table(*names: str) -> tuple[UploadTensor, ...]:
    return tuple(UploadTensor(name=name, dtype="bfloat16", shape=(2, 3)) for name in names)


def shared(tensors: tuple[UploadTensor, ...] = ()) -> SharedMemorySource:
    return SharedMemorySource(
        transfer="a" * 32, machine="here", process=1, descriptor=3, memory="b" * 32, tensors=tensors
    )


class TestNames:
    def test_the_same_tensors_have_one_name(self):
        tables = AnnouncedTables()
        tables.keep(table("a", "b"))
        tables.keep(table("a", "b"))
        tables.keep(table("a"))
        name = tables.name_for(Announcement(version=1, tensors=table("a", "b")))
        assert name is not None
        assert tables.name_for(Announcement(version=2, source=shared(table("a", "b")))) == name
        assert tables.name_for(Announcement(version=1, tensors=table("a"))) not in (None, name)
        assert tables.name_for(Announcement(version=1, tensors=table("b"))) is None

    def test_what_is_announced_by_name_has_the_tensors(self):
        tables = AnnouncedTables()
        tables.keep(table("a", "b"))
        in_parts = Announcement(version=1, tensors=table("a", "b"))
        through_memory = Announcement(version=1, source=shared(table("a", "b")))
        name = tables.name_for(in_parts)
        assert name is not None
        for announced in (in_parts, through_memory):
            short = announced.by_table(name)
            assert not short.announced_tensors
            assert tables.in_full(Announcement.model_validate_json(short.model_dump_json())) == announced

    def test_the_one_that_was_used_least_recently_makes_room(self):
        tables = AnnouncedTables()
        names = []
        for number in range(MOST_KEPT):
            tables.keep(table(f"t{number}"))
            names.append(tables.name_for(Announcement(version=1, tensors=table(f"t{number}"))))
        tables.in_full(Announcement(version=2, table=names[0]))
        tables.keep(table("another"))
        tables.in_full(Announcement(version=3, table=names[0]))
        with pytest.raises(
            TableUnknown, match=rf"table {names[1]} is not one of the {MOST_KEPT} .* version 3 with its"
        ):
            tables.in_full(Announcement(version=3, table=names[1]))


class TestAnnouncement:
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
    def test_that_contradicts_itself(self, what, complaint):
        with pytest.raises(ValueError, match=complaint):
            Announcement.model_validate({"version": 1, **what})


class TestIngest:
    async def test_a_table_outlives_its_version_and_not_the_ingest(self, model, tmp_path):
        ingest = Ingest(config_of(model, tmp_path / "log"))
        await ingest.start()
        weights: Weights = _weights(model)
        begin = begin_of(1, weights)
        plan = await ingest.begin(begin)
        assert plan.table is not None
        again = await ingest.begin(begin.by_table(plan.table))
        assert again == plan
        await ingest.discard(1)
        later = await ingest.begin(begin_of(2, weights).by_table(plan.table))
        assert (later.version, later.num_parts, later.table) == (2, plan.num_parts, plan.table)
        await ingest.stop()
        async with started(config_of(model, tmp_path / "log")) as ingest:
            with pytest.raises(TableUnknown):
                await ingest.begin(begin_of(3, weights).by_table(plan.table))

    async def test_a_table_that_does_not_fit_the_model_is_not_kept(self, model, tmp_path):
        async with started(config_of(model, tmp_path / "log")) as ingest:
            for _ in range(2):
                with pytest.raises(InvalidManifest):
                    await ingest.begin(BeginUpload(version=1, tensors=table("nobody")))


def _weights(model: Path) -> Weights:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
