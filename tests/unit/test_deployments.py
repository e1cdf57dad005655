"""Every YAML in deployments/ is built by the builder that it names."""

import shutil
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import ray
import yaml
from ray import serve
from ray.serve.deployment import Application
from ray.serve.schema import ServeDeploySchema

from rollout_service import app
from rollout_service.app import build
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import CPU, GPU, read_document, start_options

PROJECT = Path(__file__).parents[2]
CALLBACKS = {
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "rollout_service.serve_callbacks.in_controller",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rollout_service.serve_callbacks.in_proxy",
}
YAMLS = sorted((PROJECT / "deployments").glob("*.yaml"))

every_yaml = pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def application(path: Path) -> dict[str, Any]:
    (only,) = document(path)["applications"]
    return dict(only)


class TestShipped:
    @every_yaml
    def test_a_deployment_is_a_serve_config(self, path):
        (read,) = ServeDeploySchema.model_validate(document(path)).applications
        assert read.model_dump(exclude_unset=True) == application(path)
        assert document(path)["http_options"]["host"] == "127.0.0.1"

    @every_yaml
    def test_a_deployment_builds_without_starting_ray(self, path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # where a model that the YAML asks for is made
        (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)  # a folder comes before the hub
        module, _, name = application(path)["import_path"].partition(":")
        assert (module, name) == ("rollout_service.app", "build")
        build = getattr(import_module(module), name)
        # Serve makes the arguments of a builder from the class that its only parameter is annotated with
        (parameter,) = signature(build).parameters.values()
        assert parameter.annotation is ServiceConfig
        built = build(ServiceConfig.model_validate(application(path)["args"]))
        assert isinstance(built, Application)
        assert not ray.is_initialized()

    def test_a_wheel_brings_the_deployments(self, tmp_path):
        source = tmp_path / "source"
        for folder in ("rollout_service", "deployments"):
            without_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / folder, source / folder, symlinks=True, ignore=without_caches)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(PROJECT / file, source)
        build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
        [wheel] = tmp_path.glob("*.whl")
        with ZipFile(wheel) as files:
            for path in YAMLS:
                assert files.read(f"rollout_service/deployments/{path.name}") == path.read_bytes()
        assert {CPU.resolve(), GPU.resolve()} <= set(YAMLS)

    @every_yaml
    def test_a_dead_proxy_is_noticed_soon_and_a_slow_start_awaited(self, path, monkeypatch):
        options = ServeDeploySchema.model_validate(document(path)).controller_options
        assert start_options(document(path))["controller_options"] == options.model_dump(exclude_unset=True)
        assert options.runtime_env is not None
        variables = options.runtime_env["env_vars"]
        monkeypatch.delitem(sys.modules, "ray.serve._private.constants")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        constants = import_module("ray.serve._private.constants")  # Serve knows the variables by these names
        assert {name: getattr(constants, name if name in CALLBACKS else name[10:]) for name in variables} == {
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": 1,
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": 4,
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": 60,
            **CALLBACKS,
        }

    @every_yaml
    def test_the_callbacks_of_a_deployment_are_ones_that_serve_takes(self, path):
        variables = start_options(document(path))["controller_options"]["runtime_env"]["env_vars"]
        for name in CALLBACKS:
            module, _, function = variables[name].rpartition(".")
            assert not signature(getattr(import_module(module), function)).parameters


class TestOfServe:
    @pytest.mark.parametrize(("there", "missing"), [("certfile", "keyfile"), ("keyfile", "certfile")])
    def test_a_certificate_and_its_key_are_given_together(self, there, missing, tmp_path):
        with_half = document(CPU)
        with_half["http_options"][f"ssl_{there}"] = "tls"
        path = tmp_path / "half.yaml"
        path.write_text(yaml.safe_dump(with_half))
        with pytest.raises(ValueError, match=f"http_options.ssl_{there} is set, but not http_options.ssl_{missing}"):
            read_document(path)

    def test_all_that_a_file_sets_for_serve_is_what_serve_start_takes(self):
        options = {"http_options": {"port": 1}, "logging_config": {"encoding": "JSON"}, "tracing_config": None}
        assert start_options({**options, "applications": []}) == {
            "http_options": {"port": 1},
            "logging_config": {"encoding": "JSON"},
        }
        of_serve = {name for name in ServeDeploySchema.model_fields if name in signature(serve.start).parameters}
        assert start_options(dict.fromkeys(ServeDeploySchema.model_fields, 1)).keys() == of_serve


class TestApplication:
    def test_each_group_is_a_deployment_with_its_replicas(self):
        groups = {"eval": {"version": "golden", "replicas": 2}, "old": {"version": 7}}
        scaling = {"groups": groups, "num_cpus": 3, "min_replicas": 1, "max_replicas": 5}
        gateway = build(ServiceConfig.model_validate({"scaling": scaling, "model": {"path": "anywhere"}}))
        engines, *_, bound = gateway._bound_deployment.init_args[1:]
        deployments = {name: each._bound_deployment for name, each in bound.items()}
        assert {name: each.name for name, each in deployments.items()} == {"eval": "engine-eval", "old": "engine-old"}
        assert {name: each.num_replicas for name, each in deployments.items()} == {"eval": 2, "old": 1}
        assert {each.init_args[3] for each in deployments.values()} == {"eval", "old"}
        assert engines._bound_deployment.init_args[3] is None
        for each in deployments.values():
            assert each.ray_actor_options == engines._bound_deployment.ray_actor_options

    @pytest.mark.parametrize(("engine", "expected"), [({}, (0.9, 0.1)), ({"tensor_parallel_size": 2}, (2, 0))])
    def test_gpus_are_derived_where_vllm_is_built_for_them(self, engine, expected, monkeypatch):
        config = ServiceConfig.model_validate({"engine": engine, "model": {"path": "anywhere"}})

        def asked_for() -> tuple[float, float]:
            engines, ingest = (each._bound_deployment for each in build(config)._bound_deployment.init_args[1:3])
            return engines.ray_actor_options["num_gpus"], ingest.ray_actor_options["num_gpus"]

        assert asked_for() == (0, 0)
        monkeypatch.setattr(app, "is_vllm_for_cpu", lambda: False)
        assert asked_for() == expected

    def test_every_deployment_has_its_replicas_checks_and_drain(self):
        sections = {"scaling": {"drain_timeout_s": 12, "gateways": 3}, "model": {"path": "anywhere"}}
        gateway = build(ServiceConfig.model_validate(sections))
        bound = [gateway, *(each for each in gateway._bound_deployment.init_args if hasattr(each, "_bound_deployment"))]
        deployments = {each._bound_deployment.name: each._bound_deployment for each in bound}
        # another deployment would wait for GPUs or the log that it replaces
        surges = {name: each._deployment_config.max_surge_percent for name, each in deployments.items()}
        assert surges == {"gateway": 100, "engine": 0, "ingest": 0, "monitor": 0, "sessions": 0}
        assert {name: each.num_replicas for name, each in deployments.items()} == dict.fromkeys(surges, 1) | {
            "gateway": 3
        }
        for each in deployments.values():
            assert each._deployment_config.health_check_period_s <= 1
            assert each._deployment_config.graceful_shutdown_timeout_s == 12
        default = build(ServiceConfig.model_validate({"model": {"path": "anywhere"}}))
        assert default._bound_deployment.num_replicas == 1 and default._bound_deployment.init_args[4] is None
