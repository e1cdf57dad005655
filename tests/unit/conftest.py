"""What tests of several packages share: model folders, an ingest that has made version 0 from one of them, and Ray."""

import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import ray
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from rollout_service.config import ServiceConfig
from rollout_service.fleet import registry
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.receiver import process, receiver
from rollout_service.model import served_model
from rollout_service.model.tiny import make_tiny_qwen3, tiny_qwen3_config
from rollout_service.store.log import WeightLog
from tests.support.clock import Clock
from tests.support.models import make_model
from tests.support.program import Program
from tests.unit.ingest.trainer import Trainer, config_of, folder_weights, started

# No test is about a public server. Each HTTP client would read this machine's certificates, which takes 30 ms.
os.environ.pop("SSL_CERT_FILE", None)  # noqa: TID251 - httpx looks there first
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # noqa: TID251 - and then there, and finds none

# Only a power failure shows whether bytes have reached the disk, and a test that writes versions would wait for it 30
# times. A descriptor that is not open is an error as before.
os.fsync = os.fdatasync = lambda fd: os.fstat(fd if isinstance(fd, int) else fd.fileno())

# A receiver spends seconds on its imports: here it is forked from a process that has made them, and has nothing of this
# one either.
receiver.CONTEXT = multiprocessing.get_context("forkserver")
receiver.CONTEXT.set_forkserver_preload([process.__name__])

# Each ingest builds its model's modules, without weights: those of one config.json are read and never changed.
_build_modules, _modules = served_model._without_weights, dict[bytes, PreTrainedModel]()


def _modules_built_once(path: Path) -> PreTrainedModel:
    content = (path / "config.json").read_bytes()
    if content not in _modules:
        _modules[content] = _build_modules(path)
    return _modules[content]


served_model._without_weights = _modules_built_once

torch.set_num_threads(1)  # threads that wait for one another on a busy machine cost ten times what small models need


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the CPU deployment serves."""
    path = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    make_tiny_qwen3(path)
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like it, with one layer: the tests that write many versions need no more."""
    return _saved(tmp_path_factory.mktemp("models") / "one-layer", tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and the embedding is the output head: its file has no ``lm_head.weight``."""
    return _saved(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts; on disk each expert's matrices are by themselves."""
    return make_model(tmp_path_factory.mktemp("models") / "qwen3-moe", "qwen3_moe")


def _saved(path: Path, tied: bool) -> Path:
    config = tiny_qwen3_config()
    config.num_hidden_layers, config.tie_word_embeddings, config.layer_types = 1, tied, ["full_attention"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which a silent replica counts as dead."""
    clock = Clock()
    monkeypatch.setattr(registry, "time", clock)
    return clock


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log")


@pytest.fixture
async def ingest(config: ServiceConfig) -> AsyncIterator[Ingest]:
    async with started(config) as ingest:
        yield ingest


@pytest.fixture
async def trainer(ingest: Ingest) -> Trainer:
    return Trainer(ingest)


@pytest.fixture(scope="session")
def weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of ``model``."""
    return folder_weights(model)


@pytest.fixture
def log(config: ServiceConfig) -> WeightLog:
    """What a replica sees of the ingest's log."""
    return WeightLog(config.weights.root)


@pytest.fixture(scope="module")
def object_store() -> Iterator[None]:
    """Ray on this machine, of which this process is the driver."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Writes a shell script, the only program that is found by its name."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put
