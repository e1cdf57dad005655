"""The ``rollout-service`` command, against files and a listening socket."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

import rollout_service
from rollout_service.cli.main import app
from rollout_service.config import ServiceConfig
from rollout_service.protocol.fleet import (
    AttentionStatus,
    FailedStart,
    FailedStarts,
    Fleet,
    KVCacheChoice,
    KVCacheStatus,
    ReplicaStatus,
    UpdateTimings,
)
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import FAMILIES

FLEET = Fleet(
    latest_version=8,
    paused=False,
    replicas=(
        ReplicaStatus(
            replica_id="engine#one",
            version=8,
            state="ready",
            running=5,
            update=UpdateTimings(stage_s=1.0, closed_s=0.25, load_s=0.125),
            kv_cache=KVCacheStatus(choice=KVCacheChoice(dtype="bfloat16", why="2 of 2 layers do not")),
            attention=AttentionStatus(backends=("GDN_ATTN", "group"), why="[asked] for"),
        ),
        ReplicaStatus(replica_id="engine#two", version=7, state="syncing", target=8, paused=True),
        ReplicaStatus(replica_id="engine#three", version=None, state="failed", error="[boom] no memory"),
    ),
    failed_starts=FailedStarts(
        tries=2,
        first=FailedStart(replica_id="zero", reason="[boom] no disk", at=1.0),
        last=FailedStart(replica_id="three", reason="[boom] no memory", at=2.0),
        over=True,
    ),
)
TOKEN = "a-token"
APPLICATION = "applications: [{import_path: 'rollout_service.app:build', args: {}}]\n"
COMMAND = str(Path(sys.executable).with_name("rollout-service"))


class FleetHandler(BaseHTTPRequestHandler):
    """Answers ``GET /v1/fleet`` to those who have the token."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(
                401, b'{"error": {"type": "Unauthorized", "message": "the bearer token is wrong", "detail": {}}}'
            )
        elif self.path != "/v1/fleet":
            self.answer(404, b"")
        else:
            self.answer(200, FLEET.model_dump_json().encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing into the tests' output."""


@pytest.fixture
def service_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FleetHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


@pytest.fixture
def serve_config(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a Serve config with one application, whose args are given."""

    def write(args: Any) -> Path:
        path = tmp_path / "service.yaml"
        application = {"name": "rollout", "import_path": "rollout_service.app:build", "args": args}
        path.write_text(yaml.safe_dump({"applications": [application]}))
        return path

    return write


def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
    shown = {"COLUMNS": "200", "NO_COLOR": "1", **(env or {})}
    return CliRunner(env=shown).invoke(app, [str(argument) for argument in arguments])


def test_version_is_the_package_s():
    assert run("--version").output == f"{rollout_service.__version__}\n"


@pytest.mark.parametrize("group", [(), ("log",)])
def test_help_of_commands_is_wrapped_and_not_cut(group):
    said = run(*group, "--help", env={"COLUMNS": "80"}).stdout
    assert said.count("...") == 1 and max(map(len, said.splitlines())) <= 80  # of the usage
    for line in ("disks, ports and certificates.",) if not group else ("files can be linked, nothing is copied.",):
        assert line in " ".join(said.split())


@pytest.fixture
def moe_config(tmp_path: Path) -> Path:
    """config.json of a small Qwen3-MoE; there are no weights beside it."""
    FAMILIES["qwen3_moe"]().save_pretrained(tmp_path / "small-moe")
    return tmp_path / "small-moe" / "config.json"


def rows_of(table: str) -> dict[str, str]:
    """First cell of each line → the others, with single spaces."""
    cells = [line.split(maxsplit=1) for line in table.splitlines() if len(line.split()) > 1]
    return {first: " ".join(others.split()) for first, others in cells}


class TestConfig:
    def test_config_prints_what_the_service_will_use(self, serve_config):
        result = run("config", serve_config({"scaling": {"max_replicas": 3}}))
        assert result.exit_code == 0
        printed = ServiceConfig.model_validate(yaml.safe_load(result.stdout))
        assert printed == ServiceConfig.model_validate({"scaling": {"max_replicas": 3}}).resolved()

    def test_config_names_everything_that_is_wrong_at_once(self, serve_config):
        result = run(
            "config",
            serve_config(
                {
                    "modle": {},
                    "weights": {"rot": "out"},
                    "engine": {"max_model_len": 0},
                    "scaling": {"min_replicas": 3, "max_replicas": 2},
                    "auth": {"token": 12345},
                }
            ),
        )
        assert result.exit_code == 1 and result.stdout == ""
        sections = "model, quant, engine, kv_cache, chat, scaling, weights, monitor, auth"
        assert f"modle: unknown field; there are {sections}" in result.stderr
        assert "weights.rot: unknown field; there are root, " in result.stderr
        assert "engine.max_model_len: Input should be greater than 1, not 0" in result.stderr
        assert "scaling: max_replicas=2 is below min_replicas=3" in result.stderr
        assert "auth: auth.token is refused" in result.stderr and "12345" not in result.stderr

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: [", "is not YAML"),
            ("just text", "it has no list `applications`"),
            ("applications: 3", "it has no list `applications`"),
            ("applications: []", "0 applications with `import_path: rollout_service.app:build`"),
            ("applications: [{import_path: other:build}]", "0 applications"),
            ("applications: [{import_path: 'rollout_service.app:build', args: [1]}]", "must be a mapping"),
            (f"{APPLICATION}http_options: {{port: 1, host: a, port: 2}}", "the key 'port' is there twice"),
            (f"{APPLICATION}weights: {{keep_versions: 3}}", "weights is beside `args` or above it"),
            ("applications: [{import_path: 'rollout_service.app:build', quant: {}}]", "quant is beside `args`"),
            (f"{APPLICATION}http_options: [1]", "http_options must be a mapping"),
            (f"{APPLICATION}http_options: {{port: many}}", "http_options.port is many"),
            (f"{APPLICATION}http_options: {{port: 70000}}", "http_options.port is 70000"),
            (f"{APPLICATION}http_options: {{ssl_certfile: 5, ssl_keyfile: key.pem}}", "http_options.ssl_certfile is 5"),
        ],
    )
    def test_config_says_why_a_file_is_not_a_deployment(self, tmp_path, text, message):
        path = tmp_path / "service.yaml"
        path.write_text(text)
        result = run("config", path)
        assert result.exit_code == 1
        assert str(path) in result.stderr and message in result.stderr

    def test_config_passes_over_what_else_is_among_the_applications(self, tmp_path):
        path = tmp_path / "service.yaml"
        path.write_text("applications: [another, {import_path: 'rollout_service.app:build'}]")
        assert run("config", path).exit_code == 0

    def test_config_takes_a_key_that_replaces_one_of_an_anchor(self, tmp_path):
        path = tmp_path / "service.yaml"
        weights = "{<<: &more {keep_versions: 3, poll_s: 1}, keep_versions: 4}"
        path.write_text(f"applications: [{{import_path: 'rollout_service.app:build', args: {{weights: {weights}}}}}]")
        result = run("config", path)
        assert result.exit_code == 0 and "keep_versions: 4" in result.stdout and "poll_s: 1" in result.stdout

    def test_a_current_folder_that_was_removed_is_told(self, tmp_path, monkeypatch, serve_config):
        path, gone = serve_config({}), tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        result = run("config", path)
        assert result.exit_code == 1 and result.stderr.startswith("rollout-service: the current folder does not exist")


class TestInspectOfTheHub:
    REPO = "some-org/small-moe"

    @pytest.fixture
    def hub(self, moe_config: Path) -> Iterator[HubServer]:
        with hub_server() as server:
            (moe_config.parent / "model.safetensors").write_bytes(b"not to be read")
            server.publish(self.REPO, moe_config.parent, "main", "v1")
            yield server

    @staticmethod
    def run(hub: HubServer, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*hub.env(folder / "hf"), COMMAND, "inspect", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    def test_downloads_config_json_alone(self, hub, moe_config, tmp_path):
        of_the_hub = self.run(hub, tmp_path, self.REPO, "--json", "--revision", "v1")
        inspected = run("inspect", moe_config, "--json")
        assert inspected.exit_code == 0, inspected.output
        of_a_folder = json.loads(inspected.stdout)
        assert of_the_hub.returncode == 0, of_the_hub.stderr
        assert json.loads(of_the_hub.stdout) == of_a_folder | {"model": self.REPO}
        assert hub.downloaded() == ["config.json"]

    def test_a_folder_has_no_revisions(self, moe_config):
        result = run("inspect", moe_config, "--revision", "v1")
        assert result.exit_code == 1 and "model.revision is v1, but model.path=" in result.stderr


class TestInspect:
    def test_inspect_shows_what_becomes_fp8_and_why_others_do_not(self, moe_config):
        result = run("inspect", moe_config)
        assert result.exit_code == 0, result.stderr
        rows = rows_of(result.stdout)
        assert "small-moe: qwen3_moe" in result.stdout
        # In BF16 and stored: 16 matrices of 128×256; as codes, with two scales of 4 bytes for each matrix.
        assert rows["mlp.experts.*.up_proj"] == "16 128×256 1.05 MB 524 kB FP8"
        assert rows["mlp.gate"].endswith("BF16: router") and rows["lm_head"].endswith("BF16: output head")
        assert rows["total"].endswith("of BF16")
        assert run("inspect", moe_config.parent).stdout == result.stdout

    def test_inspect_shows_shards_per_gpu_and_what_stays_in_bf16(self, moe_config):
        result = run("inspect", moe_config, "--tp", "2", "--indivisible", "keep_bf16", "--skip", "*.layers.0.*.o_proj")
        assert result.exit_code == 0, result.stderr
        rows = rows_of(result.stdout)
        assert rows["mlp.experts.*.up_proj"].startswith(
            "16 128×256 64×256 1.05 MB 1.05 MB BF16: a GPU's shard [64, 256] is"
        )
        assert rows["layers.0.self_attn.o_proj"].endswith("BF16: quant.skip *.layers.0.*.o_proj")
        assert rows["layers.1.self_attn.o_proj"].endswith(" FP8")

    def test_inspect_shows_whole_experts_where_they_are_asked_for(self, moe_config):
        result = run("inspect", moe_config, "--tp", "2", "--expert-parallel", "--indivisible", "keep_bf16")
        assert result.exit_code == 0, result.stderr
        assert rows_of(result.stdout)["mlp.experts.*.up_proj"] == "16 128×256 128×256 1.05 MB 524 kB FP8"
        assert "with 4 whole experts each" in result.stdout
        assert "over how many with --tp" in run("inspect", moe_config, "--expert-parallel").stderr

    def test_inspect_gives_the_same_as_json(self, moe_config):
        result = run("inspect", moe_config, "--json", "--skip", "*.layers.1.mlp.experts")
        report = json.loads(result.stdout)
        assert report["not_converted"] == ["model.layers.1.mlp.experts"]
        kinds = {(kind["name"], kind["layers"]): kind for kind in report["kinds"]}
        assert kinds["mlp.experts.*.up_proj", "0"]["dtype"] == "FP8"
        assert kinds["mlp.experts.*.up_proj", "1"]["why_not"] == "quant.skip *.layers.1.mlp.experts"

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "no config.json there"), ("{", "config.json"), ('{"model_type": "unheard-of"}', "unheard-of")],
    )
    def test_inspect_says_why_it_cannot_read_a_model(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        result = run("inspect", tmp_path)
        assert result.exit_code == 1 and message in result.stderr


class TestFleet:
    def test_fleet_shows_every_replica(self, service_url, token_file):
        result = run("fleet", "--url", service_url, "--token-file", token_file)
        assert result.exit_code == 0, result.stderr
        assert "3 replicas; newest version 8" in result.output
        rows = {line.split()[1]: line for line in result.output.splitlines() if "engine#" in line}
        assert "0.25" in rows["engine#one"] and "0.12" in rows["engine#one"] and " 5 " in rows["engine#one"]
        assert "syncing, paused" in rows["engine#two"] and "7 → 8" in rows["engine#two"]
        assert "failed" in rows["engine#three"] and "[boom] no memory" in rows["engine#three"]
        assert result.output.count("KV cache bfloat16: 2 of 2 layers do not") == 1
        assert result.output.count("attention GDN_ATTN and group: [asked] for") == 1
        words = " ".join(result.output.split())
        assert "2 failed starts; one went well since; the first, of zero: [boom] no disk" in words

    def test_fleet_without_a_token_says_what_the_service_said(self, service_url):
        result = run("fleet", "--url", service_url)
        assert result.exit_code == 1 and "the bearer token is wrong" in result.stderr

    def test_fleet_names_the_address_where_nothing_listens(self, service_url):
        free = service_url.rpartition(":")[0] + ":1"
        result = run("fleet", "--url", free)
        assert result.exit_code == 1 and free in result.stderr

    @pytest.mark.parametrize("content", [None, "", "\n", "clé\n", "two words"])
    def test_fleet_says_which_token_file_is_of_no_use(self, tmp_path, content):
        file = tmp_path / "token"
        if content is not None:
            file.write_text(content)
        result = run("fleet", "--token-file", file)
        assert result.exit_code == 1 and str(file) in result.stderr
