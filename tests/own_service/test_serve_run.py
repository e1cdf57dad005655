"""``serve run`` works by itself, says what it does and ends by Ctrl-C; its shadow tells FP8 noise from a broken update.

One service for all of that: each costs a minute.
"""

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from benchmarks.mismatch.broken_version import commit_broken
from rollout_service.client import RolloutClient
from rollout_service.local import free_port
from rollout_service.protocol.mismatch import MismatchRow
from rollout_service.protocol.rollout import Rollout
from tests.support.processes import gone

DEPLOYMENT = Path(__file__).parents[2] / "deployments/cpu_rollout.yaml"
SERVE = str(Path(sys.executable).with_name("serve"))
MARK = "ROLLOUT_SERVICE_TEST_RUN"
GONE_S = 60.0
OUTPUT = "output"
SAID = "taking parts on 127.0.0.1, port", "is empty: version 0 is made from", "version 0: staged"
GOOD_VERSIONS = 3
TOKENS = 48
PROMPTS = [[5 + i, 6, 7, 9 + i] for i in range(40)]


@dataclass(frozen=True)
class Served:
    """What ``serve run`` runs."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    """In which it was started."""
    mark: str
    """Value of ``MARK`` in the environment of all its processes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The shipped CPU deployment with a shadow that scores half of the rollouts, in an empty folder."""
    folder, mark, port = tmp_path_factory.mktemp("serve-run"), uuid.uuid4().hex, free_port()
    config = yaml.safe_load(DEPLOYMENT.read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= {
        "weights": {"root": "out/weights", "poll_s": 1.0},
        "monitor": {"min_tokens": 500, "suspect_prob_error": 1.1},
        "shadow": {"share": 0.5},
        "scaling": {"gateways": 2},  # either sends what it samples
    }
    (folder / "deployment.yaml").write_text(yaml.safe_dump(config))
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            ["env", f"{MARK}={mark}", SERVE, "run", "deployment.yaml"], cwd=folder, stdout=output, stderr=output
        )
    try:
        while not _healthy(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, "serve run ended before it was healthy"
            time.sleep(0.5)
        yield Served(process, f"http://127.0.0.1:{port}", folder, mark)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


async def test_serve_run_makes_its_model_and_serves(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4})).status_code == 200
    assert (served.folder / "models/tiny-qwen3/model.safetensors").is_file()
    said = (served.folder / OUTPUT).read_text()
    assert [line for line in SAID if line not in said] == []


async def rolled_out(client: RolloutClient, version: int) -> list[Rollout]:
    return await client.generate_batch(PROMPTS, max_tokens=TOKENS, ignore_eos=True, min_weight_version=version)


async def shadow_is_up(client: RolloutClient) -> None:
    """``serve run`` answers before the shadow has its engine, and what is rolled out before then is never scored."""
    while not any(row.source == "shadow" for row in (await client.mismatch(0)).rows):
        await client.generate_batch(PROMPTS[:4], max_tokens=TOKENS, ignore_eos=True)
        await asyncio.sleep(0.5)


async def scored(client: RolloutClient, version: int) -> MismatchRow:
    """The shadow's row once it is judged; that it never is is what the test's time limit is for."""
    while True:
        for row in (await client.mismatch(version)).rows:
            if row.source == "shadow" and row.tokens >= 500:
                return row
        await asyncio.sleep(0.2)


def trained(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """As after some optimizer steps: every matrix moved by about a percent."""
    generator = torch.Generator().manual_seed(step)
    noise = {n: torch.randn(t.shape, generator=generator) for n, t in weights.items()}
    return {
        n: (t.float() + 0.01 * noise[n] * t.float().std()).bfloat16() for n, t in weights.items() if t.ndim == 2
    } | {n: t for n, t in weights.items() if t.ndim < 2}


async def suspects_on_metrics(url: str) -> set[tuple[str, str]]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.labels["version"], sample.labels["replica"])
        for sample in samples
        if sample.name == "rollout_version_suspect" and sample.value == 1
    }


async def test_only_a_version_with_a_layers_scales_doubled_is_suspect(served: Served) -> None:
    async with RolloutClient(served.url) as client:
        weights = load_file(served.folder / "models/tiny-qwen3/model.safetensors")
        await shadow_is_up(client)
        [replica] = [replica.replica_id for replica in (await client.fleet()).replicas]
        for version in range(1, GOOD_VERSIONS + 1):
            await client.push_weights(version, trained(weights, version))
            await rolled_out(client, version)
            row = await scored(client, version)
            assert (row.replica_id, row.suspect_since) == (replica, None), row
            assert 0 < row.k3 < 0.01 and 1 < row.prob_error < 1.1, row
        assert await suspects_on_metrics(served.url) == set()

        broken = GOOD_VERSIONS + 1
        commit_broken(served.folder / "out/weights", broken, layer=1)
        await rolled_out(client, broken)
        row = await scored(client, broken)
        status = await client.weights(broken)
        assert status.state == "live" and status.suspect is not None
        [suspicion] = status.suspect
        assert (suspicion.replica_id, suspicion.source, suspicion.since) == (replica, "shadow", row.suspect_since)
        assert await suspects_on_metrics(served.url) == {(str(broken), replica)}
        # the shadow is no replica
        assert [each.replica_id for each in (await client.fleet()).replicas] == [replica]
        assert [each.replica_id for each in status.replicas] == [replica]


async def test_ctrl_c_ends_serve_run_and_leaves_nothing(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(served.process.wait)
    assert await gone(MARK, served.mark, within_s=GONE_S) == []
