"""Versions that the service numbers, from the client to a real ingest and its log."""

import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import EngineFailed, InvalidRequest, NotFound
from tests.unit.client.conftest import stream_of
from tests.unit.client.real_ingest import real_ingest
from tests.unit.ingest.trainer import changed


async def test_a_trainer_goes_back_and_on(model, tmp_path, weights):
    kept = r"kept are 2, 3 \(run/step-3\), 4 \(run/step-1\), 5 \(run/step-2\)"
    async with (
        real_ingest(model, tmp_path / "log", weights={"keep_versions": 4}) as service,
        RolloutClient(service.url) as client,
    ):
        pushed = [
            await client.push_weights("next", changed(weights, step), label=f"run/step-{step}", wait="none")
            for step in (1, 2, 3)
        ]
        assert [(s.version, s.label) for s in pushed] == [(1, "run/step-1"), (2, "run/step-2"), (3, "run/step-3")]
        back = await client.rollback("run/step-1", wait="none")
        assert (back.version, back.rollback_of, back.digest) == (4, 1, pushed[0].digest)
        again = await client.push_weights("next", changed(weights, 7), label="run/step-2", wait="none")
        assert (again.version, again.label) == (5, "run/step-2")
        assert [s.version for s in await client.weights()] == [2, 3, 4, 5]
        with pytest.raises(NotFound, match=kept):
            await client.rollback(1, wait="none")


async def test_a_push_under_a_label_goes_on_where_it_failed(service, client, tensors):
    service.answers["PUT", "/v1/weights/1/parts/6"].append(EngineFailed("out of disk"))
    with pytest.raises(EngineFailed, match="out of disk"):
        await client.push_weights("next", tensors, label="run/step-1", parallel_parts=1)
    service.log.clear()
    tensors["layer0"] = tensors["layer0"] + 1
    async with RolloutClient(service.url) as restarted:
        status = await restarted.push_weights("next", tensors, label="run/step-1")
    assert status.version == 1 and service.uploads[1].stream == stream_of(tensors)
    sent = service.parts_sent()
    assert set(sent) >= {0, 6, 7, 8, 9} and len(sent) < 10


@pytest.mark.parametrize(("version", "label"), [("newest", None), (-1, None), ("next", "a b"), (1, "7")])
async def test_what_is_no_version_or_label_is_refused_here(service, client, tensors, version, label):
    with pytest.raises(InvalidRequest, match="version=" if label is None else "label"):
        await client.push_weights(version, tensors, label=label)
    assert service.log == []
