"""What prime-rl's collector reads of engines, parsed as it parses it."""

from prometheus_client.parser import text_string_to_metric_families

from rollout_service.metrics.exposition import exposition
from rollout_service.protocol.fleet import EngineLoad
from tests.unit.metrics.test_exposition import replica, state

BUSY = EngineLoad(running=5, waiting=2, deferred=1, kv_cache_usage=0.25, kv_cache_tokens=4096)
IDLE = EngineLoad(running=0, waiting=0, deferred=0, kv_cache_usage=0.0, kv_cache_tokens=2048)


def vllm_samples(*replicas: object) -> dict[tuple[str, ...], float]:
    """(name, labels in order) → value."""
    text = exposition(state(*replicas)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def test_each_engine_s_load_has_vllm_s_names_and_a_number():
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


def test_replicas_that_do_not_serve_yet_are_no_engines():
    assert vllm_samples(replica("a", None, state="starting", load=BUSY), replica("b", 9)) == {}
