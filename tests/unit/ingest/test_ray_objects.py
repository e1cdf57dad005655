"""A trainer in the same Ray cluster pushes references; the ingest is an actor there, without Serve or an engine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from rollout_service.client.ray_refs import push_refs
from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest, InvalidRequest, NotFound, QuantizationError, VersionConflict
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.ray_objects import Bucket, RefSource
from rollout_service.kv_scales import KVScales, LayerScales
from rollout_service.protocol.upload import BeginUpload, CommitUpload, ObjectSource
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of

pytestmark = pytest.mark.usefixtures("object_store")


class IngestActor(Ingest):
    """``Ingest`` in a process of its own, which takes seconds to start: one test after the other has it anew."""

    async def start_over(self, config: ServiceConfig) -> None:
        await self.stop()
        super().__init__(config)
        await self.start()


@pytest.fixture(scope="module")
def process(object_store: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> ray.actor.ActorHandle:
    return ray.remote(num_cpus=0)(IngestActor).remote(config_of(model, tmp_path_factory.mktemp("actor")))


@pytest.fixture
async def actor(process: ray.actor.ActorHandle, model: Path, tmp_path: Path) -> ray.actor.ActorHandle:
    await process.start_over.remote(config_of(model, tmp_path / "actor"))
    return process


def halves(weights: Weights) -> list[dict[str, torch.Tensor]]:
    names = list(weights)
    return [{name: weights[name] for name in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]


async def pushed(actor: ray.actor.ActorHandle, version: int, refs: object) -> str | None:
    return (await push_refs(actor, version, refs, wait="none")).digest


async def test_every_form_of_references_gives_the_digest_of_an_upload(
    actor: ray.actor.ActorHandle, ingest: Ingest, trainer: Trainer, weights: Weights
) -> None:
    other = changed(weights, 0.5)
    uploaded = (await trainer.push(1, other)).digest
    assert await pushed(actor, 1, [ray.put(half) for half in halves(other)]) == uploaded
    assert await pushed(actor, 2, ray.put(other)) == uploaded
    assert await pushed(actor, 3, {name: ray.put(tensor) for name, tensor in other.items()}) == uploaded


async def test_kv_scales_pushed_with_references_belong_to_the_version(
    actor: ray.actor.ActorHandle, tmp_path: Path, weights: Weights
) -> None:
    layers = {"model.layers.0.self_attn": LayerScales(q=0.5, k=2.5, v=0.125)}
    scales, refs = KVScales(layers=layers), ray.put(weights)
    first = await push_refs(actor, 1, refs, wait="none", kv_scales=scales)
    assert await push_refs(actor, 1, refs, wait="none", kv_scales=scales) == first
    assert WeightLog(tmp_path / "actor").manifest(1).kv_scales == scales.named()
    with pytest.raises(VersionConflict, match="with other KV scales"):
        await push_refs(actor, 1, refs, wait="none")
    with pytest.raises(InvalidManifest, match="3 missing"):
        elsewhere = {"model.layers.7.self_attn": layers["model.layers.0.self_attn"]}
        await push_refs(actor, 2, refs, wait="none", kv_scales=scales.model_copy(update={"layers": elsewhere}))


async def test_the_same_weights_again_are_accepted_and_others_conflict(
    actor: ray.actor.ActorHandle, weights: Weights
) -> None:
    first = await pushed(actor, 1, ray.put(weights))
    assert await pushed(actor, 1, [ray.put(half) for half in reversed(halves(weights))]) == first
    with pytest.raises(VersionConflict, match="version 1 is committed with another content") as refused:
        await pushed(actor, 1, ray.put(changed(weights, 1.0)))
    assert len(set(refused.value.detail["digests"])) == 2
    await pushed(actor, 3, ray.put(weights))
    with pytest.raises(VersionConflict, match="version 2 is not newer"):
        await pushed(actor, 2, ray.put(weights))


async def test_of_two_trainers_at_once_one_wins(actor: ray.actor.ActorHandle, weights: Weights) -> None:
    pushes = [pushed(actor, 1, ray.put(changed(weights, by))) for by in (0.25, 0.5)]
    results = await asyncio.gather(*pushes, return_exceptions=True)
    assert sorted(isinstance(result, VersionConflict) for result in results) == [False, True]


async def test_names_shapes_and_values_are_checked_as_for_an_upload(
    actor: ray.actor.ActorHandle, weights: Weights
) -> None:
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(InvalidManifest) as refused:
        await pushed(actor, 1, ray.put(without | {"model.unknown": torch.zeros(2)}))
    assert refused.value.detail["missing"] == [name] and refused.value.detail["unknown"] == ["model.unknown"]
    with pytest.raises(InvalidManifest, match=f"{name} comes twice: in bucket 0 of 2 and again in bucket 1 of 2"):
        await pushed(actor, 1, [ray.put(weights), ray.put({name: weights[name]})])
    broken = weights[name].clone()
    broken[3, 5] = torch.nan
    with pytest.raises(QuantizationError, match=name):
        await pushed(actor, 1, ray.put(weights | {name: broken}))
    assert await pushed(actor, 1, ray.put(weights))


async def test_a_lost_object_is_named(actor: ray.actor.ActorHandle, weights: Weights) -> None:
    first, second = halves(weights)

    class Putter:
        def put(self, value: dict[str, torch.Tensor]) -> list[ray.ObjectRef]:
            return [ray.put(value)]

    putter = ray.remote(num_cpus=0)(Putter).remote()
    (lost,) = ray.get(putter.put.remote(second))
    ray.kill(putter)
    with pytest.raises(NotFound, match="bucket 1 of 2 is lost: put the weights again"):
        while True:  # until Ray has seen its owner die
            await pushed(actor, 1, [ray.put(first), lost])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (torch.zeros(2), "is a Tensor, not a dict of tensors"),
        ({}, "not a dict of tensors"),
        ({3: torch.zeros(2)}, "has a key 3"),
        ({"a": [1.0]}, "a is a list, not a tensor"),
        ({"a": np.zeros(2, np.int64)}, "a is an array of int64"),
        ({"a": torch.zeros(2, dtype=torch.int16)}, "a is torch.int16"),
    ],
)
def test_what_holds_no_weights_is_said_to_be_what_it_is(value: object, complaint: str) -> None:
    with pytest.raises(InvalidManifest, match=f"bucket 0 of 1.*{complaint}"):
        RefSource([Bucket((ray.put(value),))])


def test_an_object_of_a_failed_task_is_refused_with_its_error() -> None:
    def fails() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(InvalidManifest, match=r"(?s)was to be made by a task, which failed: .*out of luck"):
        RefSource([Bucket((ray.remote(fails).remote(),))])


def test_arrays_of_numpy_are_taken_as_tensors() -> None:
    source = RefSource([Bucket((ray.put({"a": np.arange(3, dtype=np.float32)}),))])
    ((name, tensor),) = source.read(["a"])
    assert name == "a" and tensor.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("refs", [[torch.zeros(2)], {"a": torch.zeros(2)}, []], ids=["list", "dict", "empty"])
async def test_what_is_no_reference_is_refused_before_it_is_sent(refs: object) -> None:
    with pytest.raises(ValueError, match=r"not a ray\.ObjectRef|refs is empty"):
        await push_refs(None, 1, refs)


async def test_objects_cannot_be_named_over_http(ingest: Ingest) -> None:
    with pytest.raises(InvalidRequest, match="only the ingest's Python handle takes"):
        await ingest.begin(BeginUpload(version=1, source=ObjectSource(digest="00")))


async def test_a_push_that_its_ingest_did_not_survive_is_made_again(
    config: ServiceConfig, ingest: Ingest, weights: Weights, log: WeightLog
) -> None:
    source = RefSource([Bucket((ray.put(weights),))])
    await ingest._begin(source.announced(1)[0], source)
    await ingest.stop()
    successor = Ingest(config)
    await successor.start()
    assert [status.version for status in await successor.versions()] == [0]
    await successor.push_refs(1, [Bucket((ray.put(weights),))], CommitUpload())
    assert log.versions() == [0, 1]
    await successor.stop()
