"""What a replica serves while a version is loaded, and the labels of what it has served."""

from rollout_service.engine import replica_state
from rollout_service.engine.replica_state import ReplicaLife, ServedLabels
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.weight_log import Head
from tests.unit.fleet.completions import completion_of

SPLIT = completion_of((1, 2, 3), (3, 1), (5, 2), end="stop")


def test_a_closed_engine_serves_nothing_and_is_not_called_stale():
    life, first = ReplicaLife(), Head(version=1, digest="a")
    life.syncs(1)
    life.updated(first, UpdateTimings(stage_s=1.0, closed_s=0.5, load_s=0.25))
    life.syncs(2)
    assert life.serves(first) and not life.serves(Head(version=1, digest="b"))
    life.closed = True
    life.stays("torn")
    assert life.state == "syncing" and not life.serves(first)


def test_each_span_has_the_label_of_its_own_version_while_that_is_remembered(monkeypatch):
    labels = ServedLabels()

    def found() -> list[str | None]:
        [one, other] = labels.on((SPLIT, SPLIT))
        assert one == other
        return [span.label for span in one.spans]

    assert labels.on((SPLIT,)) == (SPLIT,)
    labels.serve(Head(version=3, digest="a", label="run/step-3"))
    assert found() == ["run/step-3", None]
    labels.serve(Head(version=5, digest="b", label="run/step-5"))
    assert found() == ["run/step-3", "run/step-5"]
    monkeypatch.setattr(replica_state, "MAX_VERSIONS", 1)
    labels.serve(Head(version=5, digest="c", label="run/step-5 again"))
    assert found() == [None, "run/step-5 again"]
    labels.serve(Head(version=5, digest="d"))  # the number means other weights now
    assert found() == [None, None]
