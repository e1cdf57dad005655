"""Log lines of this package go where Serve's do."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from logging.handlers import BufferingHandler

import pytest

from rollout_service.errors import EngineFailed, Overloaded, TooEarly
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.runtime import logs
from rollout_service.runtime.logs import TELL_VLLM, log_with_serve


def messages(kept: BufferingHandler) -> list[str]:
    return [record.getMessage() for record in kept.buffer]


@pytest.fixture
def serves() -> Iterator[BufferingHandler]:
    """Serve's logger as it is in a replica; both loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in ("ray.serve", "rollout_service", "vllm", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    kept = BufferingHandler(10_000)
    filters = list(loggers[0].filters)
    loggers[0].handlers, loggers[0].propagate = [kept], False
    yield kept
    loggers[0].filters = filters
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, ["told"]), (logging.WARNING, [])])
def test_lines_from_serves_level_on_are_shown_once(serves, level, shown):
    logging.getLogger("ray.serve").setLevel(level)
    log_with_serve()
    log_with_serve()
    logging.getLogger("rollout_service.engine.weight_sync").info("told")
    assert messages(serves) == shown


class TestRefusals:
    def failed(self, error: Exception) -> None:
        """Log as Serve does when a call raises."""
        try:
            raise error
        except Exception:
            logging.getLogger("ray.serve").exception("Request failed.")

    def test_a_refusal_is_one_line_without_a_traceback(self, serves):
        log = logging.getLogger("ray.serve")
        now, refusals = 0.0, logs.ShortRefusals(lambda: now)
        log.addFilter(refusals)
        try:
            for _ in range(1000):
                self.failed(Overloaded("full"))
            self.failed(TooEarly("behind\nby one"))
            assert messages(serves) == ["Overloaded: full", "TooEarly: behind by one"]
            assert not any(record.exc_info for record in serves.buffer)
            now = logs.QUIET_S
            self.failed(Overloaded("full again"))
            assert messages(serves)[-1] == "Overloaded: full again (999 more since the last such line)"
        finally:
            log.removeFilter(refusals)

    def test_a_bug_keeps_its_traceback(self, serves):
        log_with_serve()
        for _ in range(2):
            self.failed(KeyError("a bug"))
        assert [bool(record.exc_info) for record in serves.buffer] == [True, True]

    def test_processes_of_serve_shorten_refusals(self, serves):
        log_with_serve()
        self.failed(EngineFailed("died"))
        assert messages(serves) == ["EngineFailed: died"]


IN_A_REPLICA = """
import logging.handlers, sys
import ray.serve
serve, file = logging.getLogger("ray.serve"), logging.FileHandler(sys.argv[1])
serve.addHandler(logging.handlers.MemoryHandler(capacity=1, target=file))  # as Serve does
serve.setLevel(logging.INFO)

from rollout_service.config import ServiceConfig
from rollout_service.engine.args import engine_args
from rollout_service.engine.replica import EngineReplica
from rollout_service.runtime.logs import log_with_serve
from rollout_service.ingest.deployment import IngestReplica
from rollout_service.ingest.upload_server import UploadServer

log_with_serve()
config = ServiceConfig.model_validate({"model": {"path": sys.argv[2]}, "engine": {"max_model_len": 64}})
engine_args(config, (), has_tokenizer=False).create_engine_config()
UploadServer(None, "127.0.0.1")
logging.getLogger("rollout_service.engine").info("ours")
logging.getLogger("vllm.engine").info("vLLM's")
serve.info("Serve's")
"""


def test_neither_vllm_nor_uvicorn_closes_serves_log_file(tmp_path):
    make_tiny_qwen3(tmp_path / "model")
    arguments = [str(tmp_path / "log"), str(tmp_path / "model")]
    told = [f"{name}={value}" for name, value in TELL_VLLM.items()]
    subprocess.run(["env", *told, sys.executable, "-c", IN_A_REPLICA, *arguments], check=True)
    assert {"ours", "vLLM's", "Serve's"} <= set((tmp_path / "log").read_text().splitlines())
