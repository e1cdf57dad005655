"""Memory of this machine, or of the container that a process is in."""

import psutil
import pytest

from rollout_service.runtime import memory


def test_it_is_the_machine_s(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    has = memory.memory()
    assert has.total_bytes == psutil.virtual_memory().total and 0 < has.used_bytes < has.total_bytes
    assert has.kill_at == 0.95


def test_ray_s_threshold_is_the_environment_s(monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.8")
    assert memory.memory().kill_at == 0.8
    monkeypatch.setenv("RAY_memory_usage_threshold", "95%")
    with pytest.raises(ValueError, match="RAY_memory_usage_threshold=95% is not a number"):
        memory.memory()


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "reclaimable"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_s_limit_counts(monkeypatch, tmp_path, folder, limit, usage, reclaimable):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in (
        (limit, "1000000\n"),
        (usage, "900000\n"),
        ("memory.stat", f"anon 1\n{reclaimable} 300000\n"),
    ):
        (tmp_path / folder / name).write_text(text)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert (memory.memory().total_bytes, memory.memory().used_bytes) == (1_000_000, 600_000)
    if limit == "memory.max":
        (tmp_path / limit).write_text("max\n")
        assert memory.memory().total_bytes == psutil.virtual_memory().total
