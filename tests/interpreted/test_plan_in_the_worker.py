"""A worker's transfer engine from version to version: vLLM's own reload for the first one, a plan for the rest."""

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from rollout_service.engine.loading import read_ahead, staging
from rollout_service.engine.loading.staging_calls import StageAnswer
from rollout_service.engine.loading.transfer import LogUpdateInfo, LogWeightTransferEngine
from rollout_service.engine.plugin import STAGING_KEY
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store import manifest as manifest_module
from rollout_service.store import reading
from rollout_service.store import writer as writer_module
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import read_manifest
from rollout_service.store.mapped_files import SpareFiles
from rollout_service.store.writer import LogMemory
from tests.interpreted.in_memory import Upload, log_memory
from tests.unit.store.versions import FIRST, SECOND, commit, flip_a_byte

pytestmark = pytest.mark.usefixtures("host_digests")


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

    remove_duplicate = True
    """Names of parameters: False for every name of one that has several."""

    def __init__(self, derives: str = "") -> None:
        super().__init__()
        self.first = Layer(torch.zeros(4, 5), derives)
        self.second = Layer(torch.zeros(6, dtype=torch.bfloat16), derives)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters(remove_duplicate=self.remove_duplicate))
        loaded = set()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


class Copying(Model):
    """Whose ``load_weights`` copies one tensor into the parameter itself, as gpt-oss does."""

    def __init__(self, copy: Callable[[torch.nn.Parameter, torch.Tensor], object]) -> None:
        super().__init__()
        self._copy = copy
        # of another signature than the copy, as the loaders of experts are
        self.first.weight.weight_loader = lambda param, loaded, shard_id, expert_id: param.data.copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        rest = []
        for name, tensor in weights:
            if name == FIRST:
                self._copy(self.first.weight, tensor)
            else:
                rest.append((name, tensor))
        return {FIRST} | super().load_weights(rest)


def serving(
    model: torch.nn.Module, rank: int = 0, world_size: int = 1, staging: str = "host"
) -> LogWeightTransferEngine:
    """As vLLM makes it in a worker whose model has its dummy weights; with a plan, as on a GPU."""
    record_metadata_for_reloading(model)
    for layer in model.children():
        layer.quant_method.process_weights_after_loading(layer)
    config = SimpleNamespace(
        additional_config={STAGING_KEY: staging},
        parallel_config=SimpleNamespace(rank=rank, world_size=world_size),
        model_config=SimpleNamespace(dtype=torch.float32, enable_sleep_mode=False, hf_text_config=SimpleNamespace()),
    )
    engine = LogWeightTransferEngine(None, config, torch.device("cpu"), model)
    engine.may_plan = True
    return engine


def stage(engine: LogWeightTransferEngine, folder: Path) -> StageAnswer:
    return engine.stage(folder, read_manifest(folder).digest)


def update(engine: LogWeightTransferEngine, folder: Path) -> dict[str, Any]:
    """Load a version; returns the report."""
    assert stage(engine, folder).corrupt is None
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


def test_kernels_read_what_the_plan_has_copied(log):
    model = Model()
    model.register_buffer("cos_sin_cache", torch.arange(3.0), persistent=False)  # which weights do not change
    engine = serving(model)
    for version, way in ((1, "layerwise"), (2, "plan"), (3, "plan")):
        report = update(engine, log.folder(version))
        assert report["way"] == way, report
        for scale in (model.first.weight, model.first.quant_method.config.w1_scale):
            assert torch.equal(scale, of_version(version))
    assert set(dict(model.named_parameters())) == {FIRST, SECOND}


def test_a_parameter_with_two_names_or_a_loader_without_a_name_is_loaded(log):
    model = Model()
    # in two places, as vLLM's Transformers backend has shared experts and routers of a mixture
    model._modules = {"experts_first": model.first, **model._modules}
    model.remove_duplicate = False
    assert FIRST not in dict(model.named_parameters())
    model.first.weight.weight_loader = functools.partial(lambda scale, param, loaded: param.data.copy_(loaded), 1.0)
    engine = serving(model)
    for version in (1, 2, 3):
        update(engine, log.folder(version))
        assert torch.equal(model.first.weight, of_version(version))


@pytest.mark.parametrize(
    "copy",
    [
        lambda parameter, tensor: parameter.copy_(tensor),
        lambda parameter, tensor: parameter.data.copy_(tensor),
        lambda parameter, tensor: parameter.data.copy_(tensor.t().contiguous().t()),
    ],
    ids=["into the parameter", "into its data", "of another layout"],
)
def test_what_a_model_copies_into_parameters_itself_is_loaded(copy, log):
    model = Copying(copy)
    engine = serving(model)
    held = model.first.weight.data_ptr()
    for version in (1, 2, 3):
        update(engine, log.folder(version))
        assert torch.equal(model.first.weight, of_version(version))
        assert torch.equal(model.first.quant_method.config.w1_scale, of_version(version))
        assert model.first.weight.data_ptr() == held


def test_weights_that_a_reload_would_lose_fail_the_version(log):
    engine = serving(Copying(lambda parameter, tensor: parameter.data[:2].copy_(tensor[:2])))
    with pytest.raises(RuntimeError, match=r"left 1 modules without weights: \['first'\]. vLLM's Copying loads them"):
        update(engine, log.folder(1))


def test_a_tensor_derived_from_weights_forces_layerwise_loading(log):
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
def test_a_buffer_derived_from_weights_is_never_left_to_a_plan(log, derives, says):
    """A plan copies into parameters alone: the buffer would stay that of the version the plan was learnt from."""
    model = Model(derives)
    engine = serving(model)
    for version in (1, 2, 2, 3):
        report = update(engine, log.folder(version))
        assert report["way"] == "layerwise"
        assert re.search(says, report["no_plan"])


ROWS, COLUMNS, CHUNK = 64, 40, 2100
"""Of each of the two matrices, fp32, and of their chunks in bytes: 5 a matrix, and a chunk ends inside a row."""


class Shard(Model):
    """A rank's: half of the rows of one matrix, half of the columns of another, and a vector that all ranks have."""

    def __init__(self, rank: int) -> None:
        torch.nn.Module.__init__(self)
        self._rank = rank
        self.rows = Layer(torch.zeros(ROWS // 2, COLUMNS), "")
        self.columns = Layer(torch.zeros(ROWS, COLUMNS // 2), "")
        self.norm = Layer(torch.zeros(COLUMNS), "")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = dict(self.named_parameters())
        return super().load_weights((name, self.part(name, tensor)) for name, tensor in weights if name in names)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = {"rows.weight": 0, "columns.weight": 1}.get(name)
        return tensor if dim is None else tensor.chunk(2, dim)[self._rank]


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightLog:
    """A log for versions that ``begin`` begins, with chunks as small as their tensors."""
    for module in (manifest_module, reading, read_ahead, writer_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return WeightLog(tmp_path / "log")


def begin(
    log: WeightLog, version: int, memory: LogMemory, *, extra: bool = False
) -> tuple[dict[str, torch.Tensor], Upload]:
    """A version of random numbers that is not committed. ``extra``: with a tensor that the model does not have."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"rows.weight": (ROWS, COLUMNS), "norm.weight": (COLUMNS,), "columns.weight": (ROWS, COLUMNS)}
    shapes |= {"extra.weight": (COLUMNS,)} if extra else {}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    upload = Upload(log, version, [TensorSlot(name=n, dtype="float32", shape=s) for n, s in shapes.items()], memory)
    upload.store({name: tensor.numpy().data.cast("B") for name, tensor in tensors.items()})
    return tensors, upload


def commit_matrices(log: WeightLog, version: int, *, extra: bool = False) -> dict[str, torch.Tensor]:
    """A version of ``begin``, committed; returns its tensors."""
    tensors, upload = begin(log, version, log_memory(log.root), extra=extra)
    upload.commit()
    return tensors


def assert_loaded(model: Shard, tensors: dict[str, torch.Tensor]) -> None:
    """Compare the parameters of a rank with its parts of a version."""
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, model.part(name, tensors[name])), name


@pytest.mark.parametrize("rank", [0, 1])
def test_an_upload_to_a_log_in_memory_is_read_before_it_is_committed(rank, shards, monkeypatch):
    # the device is this machine's memory
    monkeypatch.setattr(staging, "pin", lambda _: lambda: None)
    monkeypatch.setattr(SpareFiles, "are_kept_in", staticmethod(lambda _: True))
    model, memory = Shard(rank), log_memory(shards.root)
    engine = serving(model, rank, world_size=2, staging="device")
    for version in range(4):
        tensors, upload = begin(shards, version, memory)
        if (ahead := engine._stager._reading_ahead) is not None:
            ahead.result(60)
        upload.commit()
        report = update(engine, shards.folder(version))
        assert report["way"] == ("plan" if version else "layerwise")
        assert_loaded(model, tensors)
        stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if version == 0:
            assert "ahead_bytes" not in report
        elif rank == 0:  # which checks all of it
            assert report["ahead_bytes"] == stored_bytes
        else:
            assert 0 < report["ahead_bytes"] < stored_bytes
    engine.shutdown()


class TestTensorParallelRank:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_stages_its_shard_alone_and_loads_it_by_a_plan(self, rank, shards, monkeypatch):
        monkeypatch.setattr(staging, "_SLACK_BYTES", 64)
        monkeypatch.setattr(staging, "PIECE_BYTES", 2 * CHUNK)
        model = Shard(rank)
        engine = serving(model, rank, world_size=2)
        shard_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
        for version, way in ((0, "layerwise"), (1, "plan"), (2, "plan")):
            tensors = commit_matrices(shards, version)
            report = update(engine, shards.folder(version))
            assert report["way"] == way, report
            assert ("unstaged" in report) == (version == 0)
            assert (report["staged_bytes"], report["area_bytes"]) == (shard_bytes, shard_bytes + 64)
            assert_loaded(model, tensors)
        assert report["copies"] <= 3

    @pytest.mark.parametrize(("rank", "finds_it"), [(0, True), (1, False)])
    def test_rank_0_checks_bytes_that_only_the_other_rank_loads(self, rank, finds_it, shards, monkeypatch):
        monkeypatch.setattr(staging, "_SLACK_BYTES", 64)
        engine = serving(Shard(rank), rank, world_size=2)
        commit_matrices(shards, 0)
        update(engine, shards.folder(0))
        commit_matrices(shards, 1)
        [matrix] = [tensor for tensor in shards.manifest(1).tensors if tensor.name == "rows.weight"]
        # the first chunk is of rows of rank 0 alone, the last one of rows of rank 1
        position = matrix.offset + (matrix.nbytes - 1 if rank == 0 else 0)
        path = shards.folder(1) / matrix.file
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        corrupt = stage(engine, shards.folder(1)).corrupt
        assert (corrupt is not None) == finds_it
        if corrupt is not None:
            assert "rows.weight" in corrupt[0] and corrupt[1]["chunk"] == 4

    def test_a_version_too_big_to_stage_loads_from_files_where_it_is_checked_again(self, log, monkeypatch):
        monkeypatch.setattr(staging, "_SLACK_BYTES", -60)
        model = Model()
        engine = serving(model)
        for version in (1, 2):
            report = update(engine, log.folder(version))
            assert report["way"] == "layerwise" and "would lie in the staging area, which has 32" in report["unstaged"]
            assert torch.equal(model.first.weight, of_version(version))
        assert stage(engine, log.folder(3)).corrupt is None
        flip_a_byte(log, 3, FIRST)
        with pytest.raises(LogCorrupt, match=FIRST):
            engine.receive_weights(LogUpdateInfo(folder=str(log.folder(3))))

    def test_another_layout_loads_layerwise_and_gets_its_own_plan(self, shards):
        model = Shard(rank=1)
        engine = serving(model, rank=1, world_size=2)
        cases = ((False, "layerwise"), (False, "plan"), (True, "layerwise"), (True, "plan"), (False, "layerwise"))
        for version, (extra, way) in enumerate(cases):
            tensors = commit_matrices(shards, version, extra=extra)
            report = update(engine, shards.folder(version))
            assert report["way"] == way and "unstaged" not in report, report
            assert_loaded(model, tensors)
