"""``rollout-service doctor`` on this machine: it ends, says everything, and exits as it should."""

import io
import json
import socket
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from rollout_service.cli.checks import Finding, Plan
from rollout_service.cli.doctor import examine, print_findings
from rollout_service.cli.main import app
from rollout_service.config.deployment_file import CPU, read_document
from rollout_service.local import free_port


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    """The shipped one for the CPU, on a port that nobody has."""
    document = read_document(CPU)
    document["http_options"]["port"] = free_port()
    document["applications"][0]["args"]["weights"]["root"] = str(tmp_path / "weights")
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_check_that_fails_is_a_warning_and_the_next_one_runs():
    def fails(_: Plan) -> list[Finding]:
        raise OSError("stale file handle")

    def works(_: Plan) -> list[Finding]:
        return [Finding(check="works", level="ok", found="yes")]

    found = examine(Plan.of(read_document(CPU)), [fails, works])
    assert [(finding.check, finding.level) for finding in found] == [("fails", "warning"), ("works", "ok")]
    assert "stale file handle" in found[0].found


def test_every_subject_is_there_and_the_exit_status_fits(deployment):
    result = CliRunner().invoke(app, ["doctor", str(deployment), "--json"])
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    port = f"port {read_document(deployment)['http_options']['port']}"
    assert {"model", "gpu", "memory", "weights.root", port} <= findings.keys()
    assert findings[port]["level"] == "ok"
    assert result.exit_code == any(finding["level"] == "problem" for finding in findings.values())


def test_a_port_that_is_taken_is_a_problem(deployment):
    port = read_document(deployment)["http_options"]["port"]
    with socket.create_server(("127.0.0.1", port)):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", str(deployment)])
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if f"port {port}" in line]
    assert line.startswith("problem") and "taken by another process" in line
    assert "Problems that keep the service from starting: 1" in result.stdout


def test_a_file_that_is_no_deployment_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "missing.yaml")])
    assert result.exit_code == 1 and "missing.yaml" in result.stderr


@pytest.mark.parametrize("width", [200, 60])
def test_the_table_tells_everything(width):
    console = Console(file=io.StringIO(), width=width)
    findings = [
        Finding(check="memory", level="ok", found="[plenty] of it"),
        Finding(check="port 8000", level="problem", found="taken", advice="http_options.port: another"),
    ]
    print_findings(findings, console)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert text == (
        "ok memory [plenty] of it problem port 8000 taken → http_options.port: another "
        "Problems that keep the service from starting: 1"
    )
