"""The policy as Ray Serve's controller gets it: shipped by value, fed with time series."""

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from rollout_service.app import scaling_options
from rollout_service.config import ScalingConfig
from rollout_service.fleet.autoscaling import (
    KV_USAGE,
    RUNNING,
    SERVING,
    SILENT_AFTER_S,
    VERSION,
    WAITING,
    ReplicaLoad,
    RolloutAutoscaling,
    fleet_at_one_moment,
)

NOW_S = 1_800_000_000.0
DELAYS = {"upscale_delay_s": 0.0, "downscale_delay_s": 600.0}


class Point:
    def __init__(self, timestamp: float, value: float) -> None:
        self.timestamp, self.value = timestamp, value


def metrics(**replicas: list[tuple[float, dict[str, float]]]) -> dict[str, dict[str, list[Point]]]:
    """Serve's form of ``replica=[(seconds ago, values), …]``."""
    idle = {RUNNING: 0.0, WAITING: 0.0, KV_USAGE: 0.0, VERSION: 1.0, SERVING: 1.0}
    return {
        key: {
            replica: [Point(NOW_S - ago, (idle | values)[key]) for ago, values in points]
            for replica, points in replicas.items()
        }
        for key in idle
    }


def context(raw: dict[str, dict[str, list[Point]]], target: int, **changes: object) -> AutoscalingContext:
    replicas = list(raw[SERVING])
    values = {
        "deployment_id": None,
        "deployment_name": "engine",
        "app_name": "rollout",
        "current_num_replicas": len(replicas),
        "target_num_replicas": target,
        "running_replicas": replicas,
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": None,
        "raw_metrics": lambda: raw,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 4,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": NOW_S,
        "config": None,
    }
    return AutoscalingContext(**values | changes)


@pytest.fixture
def policy() -> RolloutAutoscaling:
    """As the controller makes it of what it was sent."""
    sent = AutoscalingPolicy(
        policy_function=RolloutAutoscaling, policy_kwargs={"target_sequences": 10, "target_kv_usage": 0.8, **DELAYS}
    )
    received = AutoscalingPolicy.from_serialized_policy_def(sent.model_dump(), sent.get_serialized_policy_def())
    return received.get_policy()(**received.policy_kwargs)


def test_running_and_waiting_sequences_make_serve_add_replicas(policy):
    raw = metrics(a=[(1.0, {RUNNING: 8.0, WAITING: 20.0})])
    first, state = policy(context(raw, target=1))
    second, _ = policy(context(raw, target=first, policy_state=state))
    assert (first, second) == (3, 3)


def test_bounds_are_those_of_the_moment(policy):
    raw = metrics(a=[(1.0, {RUNNING: 1000.0})])
    assert policy(context(raw, target=1, capacity_adjusted_max_replicas=2))[0] == 2


def test_a_delay_runs_through_the_state_that_serve_hands_back(policy):
    targets, state = [], {}
    for seconds in (0, 300, 599, 600):
        moved = metrics(a=[(1.0 - seconds, {})], b=[(1.0 - seconds, {})])
        target, state = policy(context(moved, target=2, policy_state=state, current_time=NOW_S + seconds))
        targets.append(target)
    assert targets == [2, 2, 2, 1]


def test_replicas_are_compared_at_the_last_moment_all_reported():
    raw = metrics(
        early=[(12.0, {VERSION: 1.0}), (9.0, {VERSION: 1.0, RUNNING: 5.0})],
        late=[(10.0, {VERSION: 1.0, WAITING: 2.0}), (1.0, {VERSION: 2.0, WAITING: 7.0})],
    )
    assert fleet_at_one_moment(raw, ["early", "late"], NOW_S) == [
        ReplicaLoad(sequences=5.0, kv_usage=0.0, version=1, serving=True),
        ReplicaLoad(sequences=2.0, kv_usage=0.0, version=1, serving=True),
    ]


def test_a_new_replica_counts_from_its_first_report():
    raw = metrics(old=[(9.0, {RUNNING: 5.0})], new=[(4.0, {RUNNING: 3.0}), (1.0, {RUNNING: 8.0})])
    loads = fleet_at_one_moment(raw, ["old", "new"], NOW_S)
    assert [load and load.sequences for load in loads] == [5.0, 3.0]


def test_a_silent_or_not_yet_reporting_replica_is_unknown():
    raw = metrics(alive=[(1.0, {})], silent=[(SILENT_AFTER_S + 1, {})])
    alive, silent, newcomer = fleet_at_one_moment(raw, ["alive", "silent", "newcomer"], NOW_S)
    assert alive is not None and silent is None and newcomer is None
    assert fleet_at_one_moment({}, ["newcomer"], NOW_S) == [None]


def test_serve_adds_no_delay_and_starts_one_replica_at_min_0():
    scaling = ScalingConfig(min_replicas=0, max_replicas=3, upscale_delay_s=7)
    autoscaling: AutoscalingConfig = scaling_options(scaling)["autoscaling_config"]
    assert (autoscaling.min_replicas, autoscaling.initial_replicas, autoscaling.max_replicas) == (0, 1, 3)
    assert (autoscaling.upscale_delay_s, autoscaling.downscale_delay_s) == (0, 0)
    assert autoscaling.policy.policy_kwargs["upscale_delay_s"] == 7


def test_a_redeployment_does_not_reset_the_replica_count():
    scaling = ScalingConfig(min_replicas=1, max_replicas=3)
    assert scaling_options(scaling)["autoscaling_config"].initial_replicas is None


def test_a_fixed_fleet_has_no_policy():
    assert scaling_options(ScalingConfig(min_replicas=2, max_replicas=2)) == {"num_replicas": 2}
