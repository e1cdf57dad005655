"""Strikes on real processes."""

import asyncio
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.soak import strike as strike_module
from benchmarks.soak.account import Diary
from benchmarks.soak.strike import TITLES, Signal, Strike, Striker, alive


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A process that plays the ingest; the others are this one."""
    with subprocess.Popen(["sleep", "600"]) as process:
        victim = psutil.Process(process.pid)
        kinds = {name: [victim if name == "ingest" else psutil.Process()] for name in TITLES}
        monkeypatch.setattr(strike_module, "victims", lambda: kinds)
        yield victim
        process.kill()


def on_ingest(signal: Signal, stopped_s: float = 0.0, waits: bool = False) -> Strike:
    return Strike(0.0, "ingest", signal, stopped_s, 0.5, waits)


async def test_what_was_stopped_goes_on_when_all_is_let_go_on(victim, tmp_path):
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: "")
    assert await striker.once(on_ingest("SIGSTOP", stopped_s=3600.0)) is not None
    while victim.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    striker.let_all_go_on()
    while victim.status() == psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    assert alive(victim)


async def test_a_killed_process_must_be_gone_and_the_service_served(victim, tmp_path):
    lacking = iter(["version 3 is waited for", ""])
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: next(lacking))
    found = await striker.once(on_ingest("SIGKILL", waits=True))
    assert found is not None and found.whole_s is not None and not alive(victim)
    assert next(lacking, None) is None


async def test_a_process_that_lives_on_after_sigterm_is_named(victim, tmp_path, monkeypatch):
    monkeypatch.setattr(strike_module, "BACK_S", 0.0)
    monkeypatch.setattr(strike_module, "send", lambda process, signal: None)  # as one that ignores it
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: "")
    found = await striker.once(on_ingest("SIGTERM", waits=True))
    assert found is not None and found.whole_s is None
    assert found.missing == f"process {victim.pid} has not ended"
