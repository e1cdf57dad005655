"""``GET /metrics``: exact, of what is there now, and readable by Prometheus."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rollout_service.metrics.exposition import MEASURED_VERSIONS, MismatchRow, exposition
from rollout_service.metrics.table import OURS
from rollout_service.protocol.adapters import HeldAdapter
from rollout_service.protocol.base import Failure
from rollout_service.protocol.fleet import EngineLoad, Fleet, KVCacheChoice, KVCacheStatus, ReplicaStatus, UpdateTimings
from rollout_service.protocol.mismatch import KVAgeRow, NotJudged
from rollout_service.protocol.weights import ServiceState, WeightStatus

NOW = 1000.0
LAYER = "model.layers.0.self_attn"
BUSY = EngineLoad(running=5, waiting=2, deferred=1, kv_cache_usage=0.25, kv_cache_tokens=4096)
IDLE = EngineLoad(running=0, waiting=0, deferred=0, kv_cache_usage=0.0, kv_cache_tokens=2048)


def row(version: int, replica_id: str | None = "a", suspect_since: float | None = None) -> MismatchRow:
    """Return a row of the monitor's table."""
    return MismatchRow(
        version=version,
        replica_id=replica_id,
        tokens=5000,
        sequences=40,
        k1=-0.001,
        k3=0.002,
        chi2_token=0.004,
        chi2_seq=None,
        ess_ratio=0.97,
        prob_error=1.02,
        abs_diff_max=3.0,
        outside_ratio=0.01,
        quantiles={0.5: 0.01, 0.999: 1.5},
        kv_ages=(KVAgeRow(age=0, tokens=5000, k3=0.002, prob_error=1.02),),
        suspect_since=suspect_since,
    )


def state(*replicas: ReplicaStatus, versions: tuple[WeightStatus, ...] = ()) -> ServiceState:
    return ServiceState(
        at=NOW,
        fleet=Fleet(latest_version=9, paused=False, replicas=replicas),
        versions=versions,
        committed_at={5: 700.0, 8: 900.0, 9: 940.0},
        replicas_min=1,
        replicas_max=4,
        replica_starts=3,
        replica_failures=1,
        log_bytes=4096,
        log_free_bytes=1 << 30,
    )


def replica(name: str, version: int | None, **fields: object) -> ReplicaStatus:
    return ReplicaStatus.model_validate({"replica_id": name, "version": version, "state": "ready", **fields})


def kv_cache(measured: int | None, k_saturated: float = 0.0, **unfit: str) -> KVCacheStatus:
    """An FP8 cache of a model of one layer."""
    choice = KVCacheChoice(dtype="fp8_e4m3", why="FP8 is accurate enough for all 1 layers")
    if measured is None:
        return KVCacheStatus(choice=choice)
    saturated = {LAYER: (k_saturated, 0.0)}
    return KVCacheStatus(choice=choice, saturated=saturated, measured_version=measured, unfit=unfit)


def samples(of: ServiceState, *rows: MismatchRow, truncated: tuple[NotJudged, ...] = ()) -> list[Sample]:
    text = exposition(of, rows, truncated).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def not_judged(version: int, replica_id: str) -> NotJudged:
    return NotJudged(version=version, replica_id=replica_id, tokens=5)


def values(found: list[Sample], name: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in found if sample.name == name}


def full() -> tuple[ServiceState, MismatchRow]:
    """A state that has something of everything."""
    timings = UpdateTimings(stage_s=0.5, closed_s=0.25, load_s=0.2)
    versions = (
        WeightStatus(version=8, state="live", total_bytes=80),
        WeightStatus(version=9, state="committed", total_bytes=90),
        WeightStatus(version=10, state="staged", total_bytes=100, missing_parts=(1, 2)),
    )
    held = (HeldAdapter(name="run-a", version=3, digest="d", running=2),)
    one = replica("a", 8, update=timings, running=7, age_s=0.5, kv_cache=kv_cache(8), adapters=held)
    return state(one, versions=versions), row(9, suspect_since=950.0)


class TestServiceState:
    def test_exactly_the_declared_metrics_and_labels_are_exported(self):
        declared = {metric.name: set(metric.labels) for metric in OURS if metric.source == "service"}
        of, row = full()
        assert {
            sample.name: set(sample.labels) for sample in samples(of, row, truncated=(not_judged(9, "a"),))
        } == declared

    def test_every_family_has_its_type_and_its_help(self):
        families = {f.name: f for f in text_string_to_metric_families(exposition(full()[0]).decode())}
        for metric in (metric for metric in OURS if metric.source == "service"):
            family = families[metric.name.removesuffix("_total")]
            assert (family.type, family.documentation) == (metric.kind, metric.description)

    def test_staleness_counts_from_the_first_version_a_replica_lacks_unless_it_is_pinned(self):
        odd = 'a"b\\c\nd'  # replicas name themselves
        replicas = replica("new", 9), replica("old", 5), replica(odd, 5, group="eval")
        found = samples(state(*replicas, replica("starting", None, state="starting")))
        assert values(found, "rollout_replica_version") == {("new",): 9, ("old",): 5, (odd,): 5}
        assert values(found, "rollout_replica_staleness_versions") == {("new",): 0, ("old",): 4}
        assert values(found, "rollout_replica_staleness_seconds") == {("new",): 0, ("old",): NOW - 900.0}
        states = values(found, "rollout_replicas")
        assert states[("ready",)] == 2 and states[("starting",)] == 1 and states[("failed",)] == 0

    def test_adapters_are_summed_over_the_replicas_that_hold_them(self):
        held = HeldAdapter(name="run-a", version=3, digest="d", running=2)
        failed = held.model_copy(update={"version": 4, "error": "it hashes to another digest"})
        found = samples(state(replica("a", 9, adapters=(held, failed)), replica("b", 9, adapters=(held,))))
        assert values(found, "rollout_adapter_replicas") == {("run-a", "3"): 2}
        assert values(found, "rollout_adapter_rollouts") == {("run-a", "3"): 4}

    def test_dead_replicas_and_removed_versions_are_not_exported(self):
        before = state(replica("a", 8), replica("b", 9), versions=(WeightStatus(version=8, state="committed"),))
        after = state(replica("b", 9), versions=(WeightStatus(version=9, state="live"),))
        rows = [row(9, "a"), row(9, "b")]
        assert {s.labels["replica"] for s in samples(before, *rows) if "replica" in s.labels} == {"a", "b"}
        assert {s.labels["replica"] for s in samples(after, *rows) if "replica" in s.labels} == {"b"}
        assert set(values(samples(after), "rollout_version_bytes")) == {("9",)}

    @pytest.mark.parametrize("name", ["k3", "truncated_tokens_total"])
    def test_rows_cover_live_replicas_and_the_newest_measured_versions(self, name):
        replicas = [(version, "a") for version in range(100)] + [(99, "gone"), (99, None)]
        rows = [row(version, replica_id) for version, replica_id in replicas]
        truncated = tuple(not_judged(version, replica_id) for version, replica_id in replicas if replica_id)
        found = samples(state(replica("a", 99)), *rows, truncated=truncated)
        shown = [(s.labels["version"], s.labels["replica"]) for s in found if s.name == f"rollout_mismatch_{name}"]
        assert shown == [(str(version), "a") for version in range(100 - MEASURED_VERSIONS, 100)]

    def test_ages_of_keys_are_joined_over_versions_and_replicas(self):
        def aged(version: int, *ages: tuple[int, int, float]) -> MismatchRow:
            kv_ages = tuple(KVAgeRow(age=age, tokens=n, k3=k3, prob_error=1 + k3) for age, n, k3 in ages)
            return row(version).model_copy(update={"kv_ages": kv_ages})

        found = samples(state(replica("a", 9)), aged(8, (0, 10, 0.5)), aged(9, (0, 30, 0.1), (2, 5, 0.25)))
        shown = {
            name: {s.labels["kv_age"]: s.value for s in found if s.name == f"rollout_mismatch_kv_age_{name}"}
            for name in ("tokens", "k3", "prob_error")
        }
        assert shown["tokens"] == {"0": 40, "2": 5}
        assert shown["k3"] == pytest.approx({"0": 0.2, "2": 0.25})
        assert shown["prob_error"] == pytest.approx({"0": 1.2, "2": 1.25})

    def test_adapters_are_exported_while_a_replica_holds_them(self):
        def of(adapter: str, version: int) -> MismatchRow:
            return row(9).model_copy(update={"adapter": adapter, "adapter_version": version})

        held = HeldAdapter(name="run-a", version=3, digest="d")
        found = samples(state(replica("a", 9, adapters=(held,))), row(9), of("run-a", 3), of("run-a", 2), of("b", 3))
        assert [s.labels["adapter"] for s in found if s.name == "rollout_mismatch_k3"] == ["", "run-a@3"]

    def test_a_version_is_suspect_on_the_replica_that_is(self):
        rows = [row(9, "a", suspect_since=960.0), row(9, "b"), row(8, "a", suspect_since=910.0)]
        found = samples(state(replica("a", 9), replica("b", 9)), *rows)
        flags = {
            (s.labels["version"], s.labels["replica"]): s.value for s in found if s.name == "rollout_version_suspect"
        }
        assert flags == {("9", "a"): 1, ("9", "b"): 0, ("8", "a"): 1}
        since = [s.value for s in found if s.name == "rollout_version_suspect_timestamp_seconds"]
        assert sorted(since) == [910.0, 960.0]

    @pytest.mark.parametrize(("error", "failed"), [(None, 0), (Failure(type="QuantizationError", message="NaN"), 1)])
    def test_a_staged_version_shows_missing_parts_and_failure(self, error, failed):
        staged = WeightStatus(version=10, state="staged", missing_parts=(3, 4, 7), error=error)
        found = samples(state(versions=(staged,)))
        assert values(found, "rollout_staged_uploads") == {(): 1}
        assert values(found, "rollout_staged_missing_parts") == {("10",): 3}
        assert values(found, "rollout_staged_failed") == {("10",): failed}


def test_fp8_caches_show_their_measurement_where_there_is_one():
    bf16 = KVCacheStatus(choice=KVCacheChoice(dtype="bfloat16", why="not for 2 of 2 layers"))
    caches = {"a": kv_cache(0, 0.02, **{LAYER: "k_saturated"}), "b": kv_cache(None), "c": bf16}
    replicas = [replica(name, 9, kv_cache=cache) for name, cache in caches.items()]
    found = samples(state(*replicas, replica("d", None, state="starting")))
    assert values(found, "rollout_kv_cache_fp8") == {("a",): 1, ("b",): 1, ("c",): 0}
    assert values(found, "rollout_kv_unfit_layers") == {("a",): 1}
    assert values(found, "rollout_kv_saturated_ratio") == {(LAYER, "a", "k"): 0.02, (LAYER, "a", "v"): 0.0}


def vllm_samples(*replicas: ReplicaStatus) -> dict[tuple[str, ...], float]:
    """(name, labels in order) → value."""
    found = samples(state(*replicas))
    return {(s.name, *s.labels.values()): s.value for s in found if s.name.startswith("vllm:")}


def test_each_serving_engine_s_load_has_vllm_s_names_and_a_number():
    found = vllm_samples(replica("b", 9, load=BUSY), replica("a", 9, load=IDLE))
    assert found == {
        ("vllm:num_requests_running", "0"): 0,
        ("vllm:num_requests_running", "1"): 5,
        ("vllm:num_requests_waiting", "0"): 0,
        ("vllm:num_requests_waiting", "1"): 3,
        ("vllm:num_requests_waiting_by_reason", "0", "capacity"): 0,
        ("vllm:num_requests_waiting_by_reason", "0", "deferred"): 0,
        ("vllm:num_requests_waiting_by_reason", "1", "capacity"): 2,
        ("vllm:num_requests_waiting_by_reason", "1", "deferred"): 1,
        ("vllm:kv_cache_usage_perc", "0"): 0,
        ("vllm:kv_cache_usage_perc", "1"): 0.25,
        ("vllm:cache_config_info", "0", "2048"): 1,
        ("vllm:cache_config_info", "1", "4096"): 1,
    }
    assert vllm_samples(replica("a", None, state="starting", load=BUSY), replica("b", 9)) == {}
