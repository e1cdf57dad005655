"""Services of this machine: their ports, and a start that fails."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout_service import local
from rollout_service.config import ServiceConfig


def test_a_free_port_can_be_bound_and_is_not_ephemeral():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = local.free_port()
    assert 19_999 < port < min(first_given, 32_000)
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_free(monkeypatch):
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taken = taker.getsockname()[1]
        monkeypatch.setattr(local.random, "sample", lambda _, k: [taken, taken])
        with pytest.raises(OSError, match="100 ports from 20000 to 31999 are all taken"):
            local.free_port()


def test_a_ray_that_does_not_start_in_time_is_a_clear_error_and_others_stay_what_they_are(monkeypatch):
    error = Exception("The current node timed out during startup.")

    def init(*_: str, **__: object) -> None:
        raise error

    monkeypatch.setattr(local.ray, "init", init)
    with pytest.raises(local.ServiceNotStarted, match=r"not start: .* timed out .* is less busy"), local.local_ray():
        pass
    error = ValueError("num_gpus")
    with pytest.raises(ValueError, match="num_gpus"):
        local.start_ray()


def test_ctrl_c_in_a_start_ends_its_progress_first(monkeypatch):
    done = []

    @contextmanager
    def starting() -> Iterator[None]:
        try:
            yield
        finally:
            done.append("progress")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local.serve, "start", lambda **_: None)
    monkeypatch.setattr(local, "serve_controller", lambda: "the controller")
    monkeypatch.setattr(local, "_run", interrupt)
    monkeypatch.setattr(local, "_delete", lambda: done.append("application"))
    monkeypatch.setattr(local, "shut_down_serve", done.append)
    config = ServiceConfig.model_validate({"model": {"path": "model"}})
    with pytest.raises(KeyboardInterrupt), local.deploy(config, {}, starting()):
        pass
    assert done == ["progress", "application", "the controller"]


@pytest.mark.parametrize("given", ["", "none of it"])
def test_a_section_that_is_no_mapping_is_refused_by_name_beside_overrides(tmp_path, given):
    path = tmp_path / "service.yaml"
    path.write_text(f"applications: [{{import_path: 'rollout_service.app:build', args: {{weights: {given}}}}}]")
    with pytest.raises(ValueError, match=r"weights\n  Input should be a valid dictionary"):
        local.load_config(path, {"weights": {"root": "/tmp"}})
