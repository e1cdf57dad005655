"""A service as on a cluster: TLS by files, JSON logs, traces, and ``serve deploy`` of another configuration under load.

One service for all of that: each costs a minute.
"""

import asyncio
import json
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.torch import load_file

from rollout_service.client import RolloutClient
from rollout_service.local import free_port
from rollout_service.protocol.rollout import Rollout
from tests.support.certificates import Certificate, make_certificate
from tests.support.collector import Collector, collecting
from tests.support.processes import MARK, gone

DEPLOYMENT = Path(__file__).parents[2] / "deployments/cpu_rollout.yaml"
SERVE = str(Path(sys.executable).with_name("serve"))
BY_PROXY = "proxy_http_request gateway POST /inference/v1/generate"
BY_GATEWAY, BY_ROUTER = "replica_handle_request gateway __call__", "route_to_replica engine generate"
BY_ENGINE = "replica_handle_request engine generate"
RETRIES = 60
"""Of the client under load: the outage of an only gateway, or engine, that is replaced on two busy cores."""


@dataclass(frozen=True)
class Served:
    """What ``serve run`` runs."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    upload_port: int
    certificate: Certificate
    """Of the gateway."""
    collector: Collector
    mark: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self.folder / "service.yaml"

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text()

    def client(self, **options: Any) -> RolloutClient:
        return RolloutClient(self.url, ca_file=self.certificate.certfile, **options)

    def log_lines(self, deployment: str) -> list[dict[str, Any]]:
        """What all replicas of a deployment have logged."""
        files = (self.folder / "logs").glob(f"replica_rollout_{deployment}_*.log")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, mark = tmp_path_factory.mktemp("cluster"), uuid.uuid4().hex
    gateways = make_certificate(folder / "gateway", "127.0.0.1")
    uploads = make_certificate(folder / "uploads", "ingest.example")
    port, upload_port = free_port(), free_port()
    config = yaml.safe_load(DEPLOYMENT.read_text())
    config["http_options"] |= {"port": port, **{name: str(file) for name, file in gateways.files.items()}}
    config["logging_config"] = {"encoding": "JSON", "logs_dir": str(folder / "logs")}
    weights = {"root": "out/weights", "poll_s": 1.0, "upload_port": upload_port}
    weights |= {f"upload_{name}": str(file) for name, file in uploads.files.items()}
    config["applications"][0]["args"]["weights"] = weights
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    with collecting() as collector, (folder / "output").open("wb") as output:
        environment = {
            MARK: mark,
            "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "rollout_service.tracing:otlp_exporter",
            "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        variables = [f"{name}={value}" for name, value in environment.items()]
        process = subprocess.Popen(
            ["env", *variables, SERVE, "run", "service.yaml"], cwd=folder, stdout=output, stderr=output
        )
        served = Served(process, folder, port, upload_port, gateways, collector, mark)
        try:
            with httpx.Client(base_url=served.url, verify=str(gateways.certfile)) as http:
                while not _healthy(http):
                    assert process.poll() is None, served.said
                    time.sleep(0.5)
            yield served
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.TransportError:
        return False


def test_a_caller_that_does_not_know_the_certificate_is_not_answered(served):
    with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
        httpx.get(f"{served.url}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{served.port}/health")


async def test_weights_go_directly_to_the_ingest_with_its_certificate(served, caplog):
    async with served.client() as client:
        await client.push_weights(1, load_file(served.folder / "models/tiny-qwen3/model.safetensors"))
        rollout = await client.generate([5, 6, 7], max_tokens=4, min_weight_version=1)
    assert rollout.completions[0].versions == (1,)
    assert "not directly" not in caplog.text
    assert f"taking parts on 127.0.0.1, port {served.upload_port}, with TLS" in served.said


async def test_a_rollouts_steps_are_one_trace_with_its_weight_versions(served):
    trace_id = secrets.token_hex(16)
    async with httpx.AsyncClient(base_url=served.url, verify=str(served.certificate.certfile), timeout=60) as http:
        reply = await http.post(
            "/inference/v1/generate",
            json={"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
            headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
        )
    assert reply.is_success, reply.text
    while not (steps := {span.name: span.attributes for span in served.collector.of(trace_id)}).keys() >= {
        *(BY_PROXY, BY_GATEWAY, BY_ROUTER, BY_ENGINE)
    }:
        await asyncio.sleep(0.2)
    for step in (BY_GATEWAY, BY_ENGINE):
        assert steps[step]["rollout.weight_versions"] == (1,)
        assert steps[step]["gen_ai.response.id"] == reply.json()["request_id"]
        assert steps[step]["gen_ai.usage.output_tokens"] == 4
    [access] = [line for line in served.log_lines("gateway") if line.get("trace_id") == trace_id]
    assert access["route"] == "/inference/v1/generate"
    assert access["request_id"] == reply.headers["x-request-id"]


def test_log_lines_are_json_and_name_the_version(served):
    [committed] = [line for line in served.log_lines("ingest") if "version 1 committed" in line["message"]]
    [loaded] = [line for line in served.log_lines("engine") if line["message"].startswith("version 1: staged")]
    for line in (committed, loaded):
        assert line["weight_version"] == 1 and line["levelname"] == "INFO"
        assert line["replica"] in line["actor_name"]
    assert (committed["deployment"], loaded["deployment"]) == ("rollout_ingest", "rollout_engine")


@dataclass
class Load:
    """Rollouts one after the other, and what became of them."""

    client: RolloutClient
    rollouts: list[Rollout] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Until ``stopping``. Raises what a rollout that is lost raises."""
        while not self.stopping:
            rollout = await self.client.generate([5, 6, 7], max_tokens=64, ignore_eos=True, min_weight_version=1)
            self.rollouts.append(rollout)


@pytest.fixture
async def load(served: Served) -> AsyncIterator[Load]:
    async with served.client(retries=RETRIES) as client:
        await client.push_weights(1, load_file(served.folder / "models/tiny-qwen3/model.safetensors"))
        yield Load(client)


async def test_serve_deploy_of_another_configuration_loses_nothing(served, load):
    config = yaml.safe_load(served.config.read_text())
    args = config["applications"][0]["args"]
    args["engine"]["max_num_seqs"] = 128
    args["model"]["served_name"] = "upgraded"
    served.config.write_text(yaml.safe_dump(config))
    dashboard = re.search(r"View the dashboard at.*?(127\.0\.0\.1:\d+)", served.said)
    assert dashboard is not None, served.said
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(load.run())
        while len(load.rollouts) < 8:
            await asyncio.sleep(0.1)
        command = [SERVE, "deploy", str(served.config), "--address", f"http://{dashboard[1]}"]
        deploy = await asyncio.create_subprocess_exec("env", "RAY_AUTH_MODE=token", *command, cwd=served.folder)
        assert await deploy.wait() == 0
        before = {rollout.replica_id for rollout in load.rollouts}
        while not {rollout.replica_id for rollout in load.rollouts[-4:]}.isdisjoint(before):
            await asyncio.sleep(0.2)
        load.stopping = True
    assert {span.version for r in load.rollouts for c in r.completions for span in c.spans} == {1}
    assert all(len(rollout.completions[0].token_ids) == 64 for rollout in load.rollouts)
    async with served.client(retries=RETRIES) as client:
        assert await client.models() == ["upgraded"]
        fleet = await client.fleet()
        assert fleet.latest_version == 1 and [r.version for r in fleet.replicas] == [1]
        await client.push_weights(2, load_file(served.folder / "models/tiny-qwen3/model.safetensors"))


async def test_ctrl_c_ends_it_and_leaves_nothing(served):
    served.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(served.process.wait) == 0
    assert await gone(served.mark) == []
