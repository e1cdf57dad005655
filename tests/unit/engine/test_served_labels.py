"""Spans name the labels of the versions that a replica has served."""

from rollout_service.config import WeightsConfig
from rollout_service.engine import served_labels
from rollout_service.engine.served_labels import ServedLabels
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.protocol.weight_log import Head
from tests.unit.store.versions import stage

SPLIT = Completion(
    index=0,
    token_ids=(1, 2, 3),
    logprobs=(-0.1, -0.2, -0.3),
    finish_reason="stop",
    spans=(Span(version=3, start=0, end=1), Span(version=5, start=1, end=3)),
)


def labels_of(completion: Completion) -> list[str | None]:
    return [span.label for span in completion.spans]


def test_each_span_has_the_label_of_its_own_version():
    labels = ServedLabels()
    labels.serve(Head(version=3, digest="a", label="run/step-3"))
    assert [labels_of(c) for c in labels.on((SPLIT, SPLIT))] == [["run/step-3", None]] * 2
    labels.serve(Head(version=5, digest="b", label="run/step-5"))
    assert labels_of(labels.on((SPLIT,))[0]) == ["run/step-3", "run/step-5"]


def test_a_number_that_means_other_weights_now_loses_its_label():
    labels = ServedLabels()
    labels.serve(Head(version=5, digest="a", label="run/step-5"))
    labels.serve(Head(version=5, digest="b"))
    assert labels.on((SPLIT,)) == (SPLIT,)


def test_old_labels_are_forgotten(monkeypatch):
    monkeypatch.setattr(served_labels, "MAX_VERSIONS", 1)
    labels = ServedLabels()
    for version in (3, 5):
        labels.serve(Head(version=version, digest="a", label=f"run/step-{version}"))
    assert labels_of(labels.on((SPLIT,))[0]) == [None, "run/step-5"]


async def test_a_replica_says_the_label_of_what_it_serves(log, engine, ingest):
    log.commit(stage(log, 5).replace(label="run/step-5"), "keep")
    weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root), fingerprint="model")
    await weight_sync.start()
    assert (weight_sync.status().version, weight_sync.status().label) == (5, "run/step-5")
    assert labels_of(weight_sync.labels.on((SPLIT,))[0]) == [None, "run/step-5"]
    weight_sync.stop()
