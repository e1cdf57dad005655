"""``rollout-service serve`` up to where Ray is started: what it would run, and what it refuses to."""

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from click.testing import Result
from ray.exceptions import RayActorError
from ray.serve.schema import ServeDeploySchema
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

from rollout_service.cli import machine
from rollout_service.cli import serve as serve_module
from rollout_service.cli.checks import Plan
from rollout_service.cli.main import app
from rollout_service.cli.serve import (
    Prepared,
    deployment,
    engines_wait_for,
    how_to_call,
    keep_to_gpus,
    longest_context,
    look_at_start,
    progress_lines,
    replica_bounds,
)
from rollout_service.config import ModelConfig, ServiceConfig
from rollout_service.config.deployment_file import CPU, GPU, Document, args_of, read_document
from rollout_service.gpu import nvidia_smi
from rollout_service.ingest.ingest import Ingest
from rollout_service.local import free_port
from rollout_service.protocol.fleet import Fleet, ReplicaState, ReplicaStatus
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import make_model
from tests.unit.ingest.trainer import config_of

COMMAND = str(Path(sys.executable).with_name("rollout-service"))
REPO = "some-org/tiny-qwen3"
QWEN = ModelConfig(path=Path("Qwen/Qwen3-8B"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command is given in, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "engines_on_gpus", lambda: False)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """The deployments that would have been run."""
    documents: list[Document] = []
    monkeypatch.setattr(serve_module, "run", lambda document, **_: documents.append(document))
    return documents


def serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


class TestReplicas:
    @pytest.mark.parametrize(("text", "bounds"), [("2", (2, 2)), ("1-4", (1, 4)), ("0-8", (0, 8))])
    def test_are_a_number_or_two(self, text, bounds):
        assert replica_bounds(text) == bounds

    @pytest.mark.parametrize("text", ["", "two", "-1", "1-", "1:4", "4-1", "0"])
    def test_anything_else_is_refused(self, text):
        with pytest.raises(ValueError, match=f"--replicas {text}"):
            replica_bounds(text)


class TestDeployment:
    @pytest.mark.parametrize("on_gpus", [False, True])
    def test_is_the_shipped_one_with_the_model(self, on_gpus):
        made, shipped = deployment(QWEN, on_gpus=on_gpus), read_document(GPU if on_gpus else CPU)
        assert args_of(made).pop("model") == {"path": "Qwen/Qwen3-8B"}
        assert args_of(made)["weights"].pop("disk_root") == "out/weights-Qwen--Qwen3-8B"
        assert args_of(shipped).pop("model") and args_of(shipped)["weights"].pop("disk_root")
        args_of(shipped).pop("monitor", None)
        assert made == shipped

    def test_folders_of_one_name_have_logs_of_their_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        roots = set[str]()
        for run in ("a", "b"):
            folder = make_model(tmp_path / run / "checkpoint-100", "qwen3")
            for path in (folder, folder.relative_to(tmp_path)):
                roots.add(args_of(deployment(ModelConfig(path=path), on_gpus=True))["weights"]["disk_root"])
        assert len(roots) == 2 and all(root.startswith("out/weights-checkpoint-100-") for root in roots)

    @pytest.mark.parametrize("on_gpus", [False, True])
    def test_is_one_that_serve_run_takes(self, on_gpus):
        model = QWEN.model_copy(update={"revision": "v1", "served_name": "policy"})
        options = {"tensor_parallel_size": 2, "expert_parallel": True, "replicas": (0, 4), "port": 9000}
        made = deployment(model, on_gpus=on_gpus, **options)
        [application] = ServeDeploySchema.model_validate(made).applications
        config = ServiceConfig.model_validate(application.args)
        assert (config.scaling.min_replicas, config.scaling.max_replicas) == (0, 4)
        assert config.engine.tensor_parallel_size == 2 and config.engine.expert_parallel
        assert (Plan.of(made).port, config.model.name, config.model.revision) == (9000, "policy", "v1")

    def test_a_short_context_is_the_model_s(self, tmp_path):
        model = ModelConfig(path=make_model(tmp_path / "qwen3", "qwen3"))
        assert args_of(deployment(model, on_gpus=True))["engine"]["max_model_len"] == 32768
        prepared = Prepared.of(deployment(model, on_gpus=True))
        assert args_of(prepared.document)["engine"]["max_model_len"] == 1024
        assert prepared.plan.config.engine.max_model_len == 1024
        assert args_of(Prepared.of(deployment(model, on_gpus=False)).document)["engine"]["max_model_len"] == 512

    def test_the_choices_name_the_folder_of_the_log(self, here, tiny_model):
        prepared = Prepared.of(deployment(ModelConfig(path=tiny_model), on_gpus=False))
        log = here / args_of(prepared.document)["weights"]["disk_root"]
        log.mkdir(parents=True)
        (log / "LATEST").touch()
        assert f"weights in {log};" in prepared.choices()

    def test_the_context_of_a_model_with_images_is_its_text_model_s(self, tmp_path):
        CONFIG_MAPPING["gemma3"](text_config={"max_position_embeddings": 640}).save_pretrained(tmp_path)
        assert longest_context(ModelConfig(path=tmp_path)) == 640


class TestPrintConfig:
    def test_is_what_serve_would_run(self, here, tiny_model, started):
        options = [tiny_model, "--replicas", "1-2", "--port", free_port(), "--name", "policy"]
        printed = serve(*options, "--print-config")
        assert printed.exit_code == 0 and started == [] and not ray.is_initialized()
        served = serve(*options)
        assert served.exit_code == 0 and "on the CPU: a context of 512 tokens of the model's" in served.stderr
        file = here / "service.yaml"
        file.write_text(printed.stdout)
        assert [read_document(file)] == started
        config = ServiceConfig.model_validate(args_of(read_document(file)))
        assert config.resolved().with_gpus(False) == Plan.of(started[0]).config
        assert (config.model.name, config.model.path, config.scaling.max_replicas) == ("policy", tiny_model, 2)
        written = yaml.safe_load(printed.stdout)
        assert args_of(written)["kv_cache"]["dtype"] == "auto"  # a shipped default is written out

    def test_says_on_the_side_what_would_not_start(self, here, tiny_model):
        printed = serve(tiny_model, "--tp", 8, "--print-config")
        assert printed.exit_code == 0 and "this would not start: tensor_parallel_size=8" in printed.stderr
        assert args_of(yaml.safe_load(printed.stdout))["engine"]["tensor_parallel_size"] == 8


class TestOfTheHub:
    @pytest.fixture
    def hub(self, tiny_model: Path) -> Iterator[HubServer]:
        with hub_server() as server:
            server.publish(REPO, tiny_model)
            yield server

    def test_the_commit_is_pinned_and_no_weights_come(self, hub, tmp_path):
        command = [*hub.env(tmp_path / "hf"), COMMAND, "serve", REPO, "--print-config"]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        commit = hub.repositories[REPO].revisions["main"]
        assert args_of(yaml.safe_load(printed))["model"] == {"path": REPO, "revision": commit}
        assert "config.json" in hub.downloaded() and "model.safetensors" not in hub.downloaded()

    def test_a_download_that_was_cut_short_is_not_refused(self, hub, tiny_model, tmp_path):
        folder, environment = tmp_path / "sharded", hub.env(tmp_path / "hf")
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="3MB")
        hub.publish(REPO, folder)
        first, *rest = sorted(path.name for path in folder.glob("*.safetensors"))
        fetch = f"import huggingface_hub as hf; hf.snapshot_download({REPO!r}, allow_patterns={['config.json', first]})"
        subprocess.run([*environment, sys.executable, "-c", fetch], cwd=tmp_path, check=True)
        command = [*environment, COMMAND, "serve", REPO, "--print-config"]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "would not start" not in printed.stderr
        assert set(rest).isdisjoint(hub.downloaded())


class TestGpus:
    """A host with three GPUs; a trainer is on the second."""

    @pytest.fixture(autouse=True)
    def three(self, monkeypatch: pytest.MonkeyPatch) -> None:
        free = {0: 81079, 1: 12000, 2: 81079}
        lines = [f"{i}, NVIDIA H100 80GB HBM3, 81559, {mib}, 9.0, 580.1, GPU-{i}" for i, mib in free.items()]
        monkeypatch.setattr(nvidia_smi, "gpus", lambda: nvidia_smi.gpus_from("\n".join(lines)))
        monkeypatch.setattr(nvidia_smi, "holders", lambda: nvidia_smi.holders_from("GPU-1, 639, trainer, 69000"))
        monkeypatch.setattr(machine, "engines_on_gpus", lambda: True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    @staticmethod
    def prepared(model: Path, **options: Any) -> Prepared:
        return Prepared.of(deployment(ModelConfig(path=model), on_gpus=True, **options))

    def test_one_in_use_is_left_alone(self, tiny_model):
        prepared, gpus, lines = keep_to_gpus(self.prepared(tiny_model), None)
        assert [gpu.index for gpu in nvidia_smi.visible_gpus()] == [0, 2] == list(gpus)
        assert lines[0] == "engines use GPU 0, 2" and "process 639 (trainer)" in lines[1]
        assert "GPU 1 is left alone: 12.6 GB of 85.5 GB are free" in lines[1]
        assert lines[2] == "at most 2 replicas, and not 8: more find no GPU"
        assert args_of(prepared.document)["scaling"]["max_replicas"] == 2 == prepared.plan.config.scaling.max_replicas

    def test_those_that_are_named_are_used(self, tiny_model):
        prepared, gpus, lines = keep_to_gpus(self.prepared(tiny_model, replicas=(1, 1)), "2")
        assert [gpu.index for gpu in nvidia_smi.visible_gpus()] == [2] == list(gpus)
        assert lines[0] == "engines use GPU 2" and not any("at most" in line for line in lines)
        assert prepared.plan.config.scaling.max_replicas == 1

    def test_too_few_for_the_fewest_replicas_is_a_problem(self, tiny_model):
        prepared, _, _ = keep_to_gpus(self.prepared(tiny_model, replicas=(3, 3)), None)
        [found] = [problem.found for problem in prepared.problems() if problem.check == "gpus"]
        assert found == "2 can be used, and 3 replicas of 1 GPUs each need 3"

    @pytest.mark.parametrize(
        ("on_gpus", "named", "says"),
        [
            (
                True,
                "0,1",
                r"--gpus: GPU 1: 12\.6 GB of .*process 639 \(trainer\): end that process, or name other",
            ),
            (True, "3", "--gpus: this machine has no GPU 3: name some of 0, 1, 2"),
            (True, "one", "--gpus one: give the indices that nvidia-smi shows"),
            (False, "0", "engines run on the CPU here"),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, here, tiny_model, started, monkeypatch, on_gpus, named, says):
        monkeypatch.setattr(machine, "engines_on_gpus", lambda: on_gpus)
        result = serve(tiny_model, "--gpus", named, "--port", free_port())
        assert result.exit_code == 1 and started == [] and re.search(says, result.stderr)

    @pytest.mark.parametrize(
        ("gpus", "options", "most"),
        [
            (4, {}, 4),
            (4, {"tensor_parallel_size": 2}, 2),
            (5, {"tensor_parallel_size": 2}, 2),
        ],
    )
    def test_as_many_replicas_as_find_room(self, gpus, options, most):
        assert Plan.of(deployment(QWEN, on_gpus=True, **options)).most_replicas(gpus) == most


class TestRefusals:
    @staticmethod
    def refused(started: list[Document], *arguments: object) -> str:
        result = serve(*arguments)
        assert result.exit_code == 1 and started == [] and result.stdout == "" and not ray.is_initialized()
        return result.stderr

    def test_a_port_that_is_taken(self, here, tiny_model, started):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            said = self.refused(started, tiny_model, "--port", port)
        assert "nothing was started" in said and f"port {port}: taken by another process" in said

    def test_what_small_files_tell_is_refused(self, here, started):
        folder = make_model(here / "awq", "llama")
        (folder / "model.safetensors").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
        assert "quantized with awq" in self.refused(started, "awq", "--port", free_port())

    def test_what_no_field_can_be_is_told_in_plain_words(self, here, started):
        (here / "modèle").mkdir()
        said = self.refused(started, "modèle")
        assert "model.path=modèle has characters beyond ASCII" in said and "validation error" not in said

    def test_options_that_make_no_sense(self, here, tiny_model, started):
        assert "--replicas many" in self.refused(started, tiny_model, "--replicas", "many")
        assert "model.revision is main, but" in self.refused(started, tiny_model, "--revision", "main")

    async def test_a_log_of_another_model(self, here, tiny_model, model, started):
        root = args_of(deployment(ModelConfig(path=tiny_model), on_gpus=False))["weights"]["disk_root"]
        ingest = Ingest(config_of(model, here / root))
        await ingest.start()
        await ingest.stop()
        said = self.refused(started, tiny_model, "--port", free_port())
        assert "holds version 0 of another model or quantization" in said and "name another weights.root" in said


def test_how_to_call_is_a_command_and_python():
    lines = how_to_call(Plan.of(deployment(QWEN, on_gpus=False, port=8123)), "127.0.0.1:8265").splitlines()
    [line] = [line for line in lines if line.strip().startswith("curl")]
    words = shlex.split(line)
    assert "http://127.0.0.1:8123/v1/completions" in words and json.loads(words[-1])["max_tokens"] == 16
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("from rollout_service"))
    code = "\n".join(line.removeprefix("    ") for line in lines[first : first + 3])
    names = compile(code, "how_to_call", "exec").co_names
    assert {"SyncRolloutClient", "generate"} <= set(names) and "http://127.0.0.1:8123" in code


def test_a_change_is_said_once_and_the_same_again_later():
    said, enough = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line.partition(": ")[2])
        if len(said) == 4:
            enough.set()

    looks = iter(["Ray Serve starts", "Ray Serve starts", "", "vLLM starts"])
    with progress_lines(lambda: next(looks, "version 0"), say, look_s=0.001, repeat_s=0.05):
        assert enough.wait(30)
    assert said[:4] == ["Ray Serve starts", "vLLM starts", "version 0", "version 0"]


def test_a_controller_that_died_is_a_line_and_not_the_end_of_all_lines(monkeypatch):
    def status() -> None:
        raise RayActorError

    monkeypatch.setattr(ray.serve, "status", status)
    assert look_at_start("http://127.0.0.1:1", "rollout") == "Ray Serve does not answer: RayActorError"


def test_the_first_engine_that_does_not_serve_is_named():
    def fleet(*replicas: tuple[ReplicaState, str | None]) -> Fleet:
        statuses = tuple(
            ReplicaStatus(replica_id=str(number), version=None, state=state, error=error)
            for number, (state, error) in enumerate(replicas)
        )
        return Fleet(latest_version=3, paused=False, replicas=statuses)

    assert engines_wait_for(fleet()) == "the engine's process starts"
    assert engines_wait_for(fleet(("ready", None))) == ""
    assert engines_wait_for(fleet(("ready", None), ("syncing", None))) == "the engine loads version 3 (1 of 2 engines)"
    assert engines_wait_for(fleet(("starting", None))).startswith("vLLM starts; ")
    assert engines_wait_for(fleet(("starting", "GPU 1 is taken"))) == "GPU 1 is taken"
