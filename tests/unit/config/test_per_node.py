"""Settings that each node spells for itself, and what a replica asks Ray for."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_service.app import _resources
from rollout_service.config import ServiceConfig
from rollout_service.model.hub import pinned, with_model_here


def config_of(**model: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": model})


def test_each_node_finds_the_model_in_its_own_folder(tmp_path, monkeypatch):
    config = pinned(config_of(path="$MODELS_OF_TEST/qwen").resolved())
    assert config.model.path == Path("$MODELS_OF_TEST/qwen") and config.model.name == "qwen"
    for node in ("a", "b"):
        monkeypatch.setenv("MODELS_OF_TEST", str(tmp_path / node))
        here = with_model_here(config).model
        assert here.path == tmp_path / node / "qwen" and here.name == "qwen"


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("MODELS_OF_TEST", raising=False)
    with pytest.raises(ValueError, match=r"model\.path is \$MODELS_OF_TEST/qwen, and on .*: set the variable"):
        with_model_here(config_of(path="$MODELS_OF_TEST/qwen"))


def test_a_name_that_each_node_makes_anew_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ValidationError, match=r"set model\.served_name"):
        config_of(path="$MODEL_OF_TEST")
    monkeypatch.setenv("MODEL_OF_TEST", str(tmp_path))
    assert with_model_here(config_of(path="$MODEL_OF_TEST", served_name="qwen")).model.name == "qwen"


def test_a_replica_asks_ray_for_more_than_gpus():
    config = ServiceConfig.model_validate({"scaling": {"num_gpus": 1, "resources": {"rollout_node": 1}}})
    assert _resources(config)["resources"] == {"rollout_node": 1.0}


@pytest.mark.parametrize(
    ("resources", "why"),
    [({"GPU": 1}, "set scaling.num_gpus"), ({"CPU": 1}, "set scaling.num_cpus"), ({"node": 0}, "greater than 0")],
)
def test_a_resource_with_a_setting_of_its_own_is_refused(resources, why):
    with pytest.raises(ValidationError, match=why):
        ServiceConfig.model_validate({"scaling": {"resources": resources}})
