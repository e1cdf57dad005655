"""Debian's Prometheus: found or fetched, started on loopback, asked over HTTP."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from rollout_service.local import free_port

Say = Callable[[str], None]
START_S, STOP_S = 60.0, 20.0
_DOWNLOAD = "apt-get", "download", "prometheus"


class PrometheusUnavailable(RuntimeError):
    """There is none, and none can be fetched; or it does not start."""


@dataclass(frozen=True)
class Tools:
    """Two programs of one package."""

    prometheus: str
    promtool: str

    def check(self, *arguments: str) -> str:
        """What ``promtool check`` said. Raises subprocess.CalledProcessError if it does not like something."""
        run = subprocess.run([self.promtool, "check", *arguments], check=True, stdout=subprocess.PIPE, text=True)
        return run.stdout.strip()


def found_or_fetched(folder: Path, say: Say) -> Tools:
    """Those on PATH, or Debian's package unpacked below ``folder``.

    It is unpacked and not installed: that needs no root, and starts no daemon at port 9090.
    Raises PrometheusUnavailable.
    """
    tools = _found(folder)
    if tools is None:
        say(f"no prometheus and promtool on PATH: fetching Debian's package into {folder}")
        _fetch(folder)
        tools = _found(folder)
    if tools is None:
        raise PrometheusUnavailable(f"Debian's package has no prometheus and promtool in {folder}: put them on PATH")
    return tools


def _found(folder: Path) -> Tools | None:
    programs = [
        shutil.which(name) or shutil.which(name, path=folder / "usr/bin") for name in ("prometheus", "promtool")
    ]
    return Tools(programs[0], programs[1]) if programs[0] and programs[1] else None


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not _quietly(_DOWNLOAD, folder):
            _quietly(["apt-get", "update"], folder)  # lists may be missing; without root this fails, and so below
            subprocess.run(_DOWNLOAD, cwd=folder, check=True, capture_output=True, text=True)
        for package in folder.glob("prometheus_*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True, capture_output=True, text=True)
            package.unlink()
    except FileNotFoundError as error:
        raise PrometheusUnavailable(
            f"{error.filename} is not here, so this is no Debian or Ubuntu: put prometheus and promtool on PATH"
        ) from error
    except subprocess.CalledProcessError as error:
        raise PrometheusUnavailable(
            f"{' '.join(error.cmd)}: {error.stderr.strip()[-500:]}\nrun `apt-get update` as root, or put "
            "prometheus and promtool on PATH"
        ) from error


def _quietly(command: Sequence[str], folder: Path) -> bool:
    return subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0


def configured(shipped: Path, folder: Path, service: str, agents: Sequence[str], interval_s: int) -> Path:
    """``shipped`` (dashboards/prometheus.yml) with this run's targets and intervals, and nothing else changed.

    ``agents``: host:port of Ray's agents, written into a discovery file of Ray's format.
    """
    config = yaml.safe_load(shipped.read_text())
    config["global"] = dict.fromkeys(config["global"], f"{interval_s}s")
    config["rule_files"] = [str((shipped.parent / name).absolute()) for name in config["rule_files"]]
    discovery = folder / "prom_metrics_service_discovery.json"
    discovery.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": list(agents)}]))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["rollout-service"]["static_configs"] = [{"targets": [service]}]
    jobs["ray"]["file_sd_configs"][0]["files"] = [str(discovery.absolute())]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels, and (Unix time in seconds, value) of finite samples."""

    labels: dict[str, str]
    samples: list[tuple[float, float]]


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=60)

    def range(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        """``query_range``; raises httpx.HTTPStatusError with Prometheus' words for an expression that is wrong."""
        answer = self._get("query_range", {"query": expr, "start": start, "end": end, "step": step_s})
        series = [Series(each["metric"], _finite(each["values"])) for each in answer["result"]]
        return [each for each in series if each.samples]

    def label_values(self, selector: str, label: str) -> list[str]:
        """What Grafana's ``label_values`` gives."""
        values: list[str] = self._get(f"label/{label}/values", {"match[]": selector})
        return values

    def rules(self) -> list[dict[str, Any]]:
        """Alert rules, with their health."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def down(self) -> list[str]:
        """Targets whose last scrape failed, or that were not scraped yet, with the reason."""
        targets = self._get("targets", {"state": "active"})["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]

    def _get(self, path: str, params: dict[str, Any]) -> Any:
        reply = self._http.get(f"/api/v1/{path}", params=params)
        if reply.is_client_error:
            raise httpx.HTTPStatusError(reply.text, request=reply.request, response=reply)
        return reply.raise_for_status().json()["data"]

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()


def _finite(values: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(value)) for at, value in values if value not in ("NaN", "+Inf", "-Inf")]


@contextmanager
def running(tools: Tools, config: Path, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with its data and log in ``folder``, until the end, however it comes."""
    port = free_port()
    command = [
        tools.prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _await_ready(server, process, folder / "prometheus.log")
        yield server
    finally:
        server.close()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{server.url}/-/ready").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise PrometheusUnavailable(f"Prometheus did not start:\n{log.read_text()[-2000:]}")
