"""A worker's transfer engine from version to version: vLLM's own reload for the first one, a plan for the rest."""

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from rollout_service.engine.plugin import STAGING_KEY
from rollout_service.engine.transfer import LogUpdateInfo, LogWeightTransferEngine
from rollout_service.weights.log import WeightLog
from tests.unit.weights.versions import FIRST, SECOND, commit


class Experts(QuantizeMethodBase):
    """Keeps the scales that it finds when weights were loaded, as vLLM's methods for experts do."""

    def __init__(self, derives: str) -> None:
        self._derives = derives
        self.derived: torch.Tensor | None = None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        parameter = torch.nn.Parameter(kwargs["like"], requires_grad=False)
        parameter.weight_loader = lambda param, loaded: param.data.copy_(loaded)
        layer.register_parameter("weight", parameter)

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return layer.weight

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.config = fp8_w8a8_moe_quant_config(layer.weight, layer.weight, block_shape=[128, 128])
        if self._derives == "tensor":
            self.derived = 2 * layer.weight.float()
        elif self._derives == "buffer":  # made for the first weights, and filled again for each later ones
            layer.register_buffer("absorbed", 2 * layer.weight.float())
        elif self._derives == "buffer there before":
            layer.table.copy_(layer.weight.float().mean())


class Layer(torch.nn.Module):
    def __init__(self, like: torch.Tensor, derives: str) -> None:
        super().__init__()
        if derives == "buffer there before":
            self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.quant_method = Experts(derives)
        self.quant_method.create_weights(self, like=like)


class Model(torch.nn.Module):
    """Of the versions that ``commit`` makes."""

    def __init__(self, derives: str = "") -> None:
        super().__init__()
        self.first = Layer(torch.zeros(4, 5), derives)
        self.second = Layer(torch.zeros(6, dtype=torch.bfloat16), derives)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


def serving(model: Model) -> LogWeightTransferEngine:
    """As vLLM makes it in a worker whose model has its dummy weights."""
    record_metadata_for_reloading(model)
    for layer in (model.first, model.second):
        layer.quant_method.process_weights_after_loading(layer)
    config = SimpleNamespace(
        additional_config={STAGING_KEY: "host"}, parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32)
    )
    return LogWeightTransferEngine(None, config, torch.device("cpu"), model)


def update(engine: LogWeightTransferEngine, folder: Path) -> dict[str, Any]:
    """Load a version; returns the report."""
    engine.stage(folder)
    engine._area.finish()
    engine.start_weight_update()
    engine.receive_weights(LogUpdateInfo(folder=str(folder)))
    engine.finish_weight_update()
    return engine.report


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path)
    for version in (1, 2, 3):
        commit(log, version)
    return log


def of_version(version: int) -> torch.Tensor:
    """What ``commit`` writes for the first tensor."""
    return torch.frombuffer(bytearray([version] * 80), dtype=torch.float32).view(4, 5)


def test_kernels_read_what_the_plan_has_copied(log: WeightLog) -> None:
    model = Model()
    engine = serving(model)
    for version, way in ((1, "layerwise"), (2, "plan"), (3, "plan")):
        report = update(engine, log.folder(version))
        assert report["way"] == way, report
        for scale in (model.first.weight, model.first.quant_method.config.w1_scale):
            assert torch.equal(scale, of_version(version))
    assert set(dict(model.named_parameters())) == {FIRST, SECOND}


def test_without_a_plan_for_what_is_made_from_weights_each_version_is_loaded_layerwise(log: WeightLog) -> None:
    model = Model(derives="tensor")
    engine = serving(model)
    for version in (1, 2):
        report = update(engine, log.folder(version))
        assert report["way"] == "layerwise"
        assert "is made when weights are loaded" in report["no_plan"]
        assert torch.equal(model.first.quant_method.derived, 2 * of_version(version))


@pytest.mark.parametrize(
    ("derives", "says"),
    [
        ("buffer", r"first\.absorbed is a buffer that is made from weights"),
        # vLLM counts it among what is to be loaded, and so processes its layer only after all copies were made
        ("buffer there before", r"first\.weight is loaded in another way than by copies"),
    ],
)
def test_a_buffer_that_is_made_from_weights_is_never_left_to_a_plan(log: WeightLog, derives: str, says: str) -> None:
    """A plan copies into parameters alone: the buffer would stay that of the version the plan was learnt from."""
    model = Model(derives)
    engine = serving(model)
    for version in (1, 2, 2, 3):
        report = update(engine, log.folder(version))
        assert report["way"] == "layerwise"
        assert re.search(says, report["no_plan"])


def test_a_buffer_that_weights_do_not_change_is_left_alone(log: WeightLog) -> None:
    model = Model()
    model.register_buffer("cos_sin_cache", torch.arange(3.0), persistent=False)
    engine = serving(model)
    assert [update(engine, log.folder(version))["way"] for version in (1, 2)] == ["layerwise", "plan"]
