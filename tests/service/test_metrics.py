"""A plain scrape sees what every process counted, and the state of the whole."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from rollout_service.metrics.table import OURS, SERVE, VLLM
from tests.support.fp8_cache import CACHE_DTYPE
from tests.support.telltale import canary_weights

PROMPT = [5, 6, 7, 9, 11] * 60  # longer than two blocks of the prefix cache
ADDED_BY_RAY = {
    "Component", "NodeAddress", "SessionName", "Version", "WorkerId", "application", "deployment", "replica",
    "otel_scope_name", "otel_scope_schema_url", "otel_scope_version",
}  # fmt: skip
RARE = {"ray_vllm_num_preemptions_total"}
"""Nothing here makes vLLM preempt."""


async def scraped(targets: Iterable[str]) -> list[Sample]:
    """All samples of the targets, as Prometheus would read them: no token."""
    async with httpx.AsyncClient(timeout=60) as http:
        replies = [(await http.get(url)).raise_for_status() for url in targets]
    return [
        sample
        for reply in replies
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    ]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def base_name(sample: Sample) -> str:
    """The metric of a histogram's series."""
    for suffix in ("_bucket", "_count", "_sum"):
        if sample.name.endswith(suffix) and "seconds" in sample.name:
            return sample.name.removesuffix(suffix)
    return sample.name


@dataclass(frozen=True)
class Counter:
    """One counter of the processes, and by how much sixteen rollouts and an update move it at least."""

    name: str
    more: float
    labels: dict[str, str] = field(default_factory=dict)

    def value(self, samples: list[Sample]) -> float:
        return total(samples, self.name, **self.labels)


INGEST = {"deployment": "ingest"}
MOVED = (
    Counter("ray_rollout_requests_total", 16, {"outcome": "ok"}),
    Counter("ray_rollout_completions_total", 32, {"finish_reason": "length"}),
    Counter("ray_rollout_prompt_tokens_total", 16 * len(PROMPT)),
    Counter("ray_rollout_completion_tokens_total", 16 * 2 * 16),
    Counter("ray_rollout_time_to_last_token_seconds_count", 16),
    Counter("ray_rollout_commits_total", 1, {"outcome": "ok", **INGEST}),
    Counter("ray_rollout_upload_bytes_total", 1, INGEST),
    Counter("ray_rollout_quantize_bytes_total", 1, INGEST),
    Counter("ray_rollout_quantize_seconds_total", 1e-6, INGEST),
    Counter("ray_rollout_updates_total", 2, {"outcome": "ok", "deployment": "engine"}),
    Counter("ray_rollout_update_seconds_count", 2, {"stage": "closed", "deployment": "engine"}),
    Counter("ray_vllm_generation_tokens_total", 16 * 2 * 16),
)


async def rolled_out(service: LocalService, client: RolloutClient, before: list[Sample]) -> list[Sample]:
    """What the agents show once all that sixteen rollouts and an update move has moved, or after six reports of Ray."""
    for _ in range(2):  # the second finds the first's prompts in the prefix cache
        await client.generate_batch([PROMPT] * 8, n=2, max_tokens=16, ignore_eos=True)
    version = (await client.fleet()).latest_version + 1
    await client.push_weights(version, canary_weights(service.config.model.path, version))
    for _ in range(60):  # Ray reports every 10 s, each process at a time of its own and what was before the test, too
        after = await scraped(service.metrics_targets[1:])
        if all(counter.value(after) >= counter.value(before) + counter.more for counter in MOVED):
            break
        await asyncio.sleep(1)
    return after


@pytest.fixture(scope="module")
def scrapes(service: LocalService) -> tuple[list[Sample], list[Sample]]:
    """What the agents show before and after rollouts and an update. Ray takes ten seconds to tell."""

    async def both() -> tuple[list[Sample], list[Sample]]:
        async with RolloutClient(service.url, token=service.config.auth.secret()) as client:
            before = await scraped(service.metrics_targets[1:])
            return before, await rolled_out(service, client, before)

    return asyncio.run(both())


async def test_rollouts_and_an_update_move_what_the_processes_count(scrapes, client):
    before, after = scrapes
    by = {(c.name, *c.labels.values()): c.value(after) - c.value(before) for c in MOVED}
    assert {key: by[key] for key, c in zip(by, MOVED, strict=True) if by[key] < c.more} == {}
    fleet = await client.fleet()
    assert {r.attention and r.attention.backends for r in fleet.replicas} == {("CPU_ATTN",)}
    assert not [s for s in after if s.name.startswith("ray_rollout_decode_kv_tokens")]  # of groups' attention alone
    replicas = {replica.replica_id for replica in fleet.replicas}
    updated = {s.labels["replica"] for s in after if s.name == "ray_rollout_updates_total"}
    idle = {s.labels["replica"] for s in after if s.name == "ray_rollout_sequences"}
    generated = {s.labels["ReplicaId"] for s in after if s.name == "ray_vllm_generation_tokens_total"}
    assert replicas == idle and replicas <= updated and generated & replicas


def test_our_metrics_match_the_table_and_those_of_others_exist(scrapes):
    _, samples = scrapes
    declared = {metric.name: set(metric.labels) for metric in OURS}
    for sample in samples:
        if sample.name.startswith("ray_rollout_"):
            assert set(sample.labels) - ADDED_BY_RAY - {"le"} == declared[base_name(sample)], sample
    names = {base_name(sample) for sample in samples}
    assert {metric.name for metric in VLLM + SERVE} - names - RARE == set()
    assert "ray_vllm_inter_token_latency_seconds" not in names  # observed for each token, it would cost too much


async def test_one_scrape_of_the_service_says_where_the_fleet_is(service, client):
    version = (await client.fleet()).latest_version + 1
    await client.push_weights(version, canary_weights(service.config.model.path, version))
    fleet = await client.fleet()
    samples = await scraped(service.metrics_targets[:1])

    def by_replica(name: str) -> dict[str, float]:
        return {s.labels["replica"]: s.value for s in samples if s.name == name}

    ids = [replica.replica_id for replica in fleet.replicas]
    assert total(samples, "rollout_latest_version") == version
    assert by_replica("rollout_replica_version") == dict.fromkeys(ids, version)
    assert by_replica("rollout_replica_staleness_seconds") == dict.fromkeys(ids, 0.0)
    assert total(samples, "rollout_replicas", state="ready") == len(ids) == 2
    assert by_replica("rollout_kv_cache_fp8") == dict.fromkeys(ids, float(CACHE_DTYPE == "fp8_e4m3"))
    assert total(samples, "rollout_version_state", version=str(version), state="live") == 1
    for replica in fleet.replicas:
        assert replica.update is not None
        closed = total(samples, "rollout_replica_update_seconds", replica=replica.replica_id, stage="closed")
        assert closed == replica.update.closed_s
