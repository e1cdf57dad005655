"""Log lines of this package go where Serve's do."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.logs import TELL_VLLM, log_with_serve
from rollout_service.model.tiny import make_tiny_qwen3


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def serves() -> Iterator[Kept]:
    """Serve's logger as it is in a replica; both loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in ("ray.serve", "rollout_service", "vllm", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    kept = Kept()
    loggers[0].handlers, loggers[0].propagate = [kept], False
    yield kept
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, ["told"]), (logging.WARNING, [])])
def test_lines_from_serves_level_on_are_shown_once(serves: Kept, level: int, shown: list[str]) -> None:
    logging.getLogger("ray.serve").setLevel(level)
    log_with_serve()
    log_with_serve()
    logging.getLogger("rollout_service.engine.weight_sync").info("told")
    assert serves.messages == shown


IN_A_REPLICA = """
import logging.handlers, os, sys
import ray.serve
serve, file = logging.getLogger("ray.serve"), logging.FileHandler(sys.argv[1])
serve.addHandler(logging.handlers.MemoryHandler(capacity=1, target=file))  # as Serve does
serve.setLevel(logging.INFO)

from rollout_service.config import ServiceConfig
from rollout_service.engine.args import engine_args
from rollout_service.engine.replica import EngineReplica
from rollout_service.logs import TELL_VLLMS_OWN_PROCESSES, log_with_serve
from rollout_service.shadow.deployment import ShadowReplica
from rollout_service.ingest.deployment import IngestReplica
from rollout_service.ingest.upload_server import UploadServer

log_with_serve()
config = ServiceConfig.model_validate({"model": {"path": sys.argv[2]}, "engine": {"max_model_len": 64}})
os.environ.update(TELL_VLLMS_OWN_PROCESSES)
engine_args(config, (), has_tokenizer=False).create_engine_config()
UploadServer(None, None, "127.0.0.1")
logging.getLogger("rollout_service.engine").info("ours")
logging.getLogger("vllm.engine").info("vLLM's")
serve.info("Serve's")
"""


def test_neither_vllm_nor_uvicorn_closes_serves_log_file(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model")
    arguments = [str(tmp_path / "log"), str(tmp_path / "model")]
    told = [f"{name}={value}" for name, value in TELL_VLLM.items()]
    subprocess.run(["env", *told, sys.executable, "-c", IN_A_REPLICA, *arguments], check=True)
    assert {"ours", "vLLM's", "Serve's"} <= set((tmp_path / "log").read_text().splitlines())
