"""Sends SIGKILL, SIGTERM and SIGSTOP to any process at random moments, under load, and says what it cost.

    python -m benchmarks.soak [--minutes 20] [--seed 1] [--replicas 1]

The shipped CPU deployment with so many engines and as many gateways, six callers, a trainer that pushes without end,
and weights whose every token tells their version. Struck are: replica, engine core, vLLM worker, ingest, gateway,
monitor, Serve's controller and its HTTP proxy; not Ray's own daemons. The same seed gives the same strikes in the same
order. What happened when is in ``out/soak/``. Ends with status 0 if no token was stale, no request and no version
lost, the service came back after every strike, and none of its processes was left at the end; with 1 if not, and 130
if it was interrupted.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run as run_command
from benchmarks.common.paths import CPU_DEPLOYMENT, PROJECT
from benchmarks.common.results import Json
from benchmarks.faults.ground import Ground, Load, load, settings
from benchmarks.soak.account import Diary
from benchmarks.soak.callers import Probe, Pusher
from benchmarks.soak.engines import EngineStarts
from benchmarks.soak.report import is_clean, told_of_waits
from benchmarks.soak.strike import Blow, Striker, send, strikes
from rollout_service.client import RolloutClient
from rollout_service.local import LocalService, running_service
from tests.support.processes import MARK, gone, marked

CALLERS = 6
LAST_ANSWERS_S = 120.0  # what is not answered so long after the last strike was recovered from is lost
OUT = PROJECT / "out/soak"

console = Console(soft_wrap=True)


async def soak(service: LocalService, seed: int, minutes: float, replicas: int, diary: Diary) -> Json:
    """Strike for so many minutes, wait until the service is whole again, and return what came of it."""
    async with RolloutClient(service.url, retries=12) as client:
        place = Ground(service, client, committed=0, replicas=replicas)
        pusher = Pusher(place, diary, seed)
        await pusher.first()
        diary.begin()
        try:
            async with asyncio.timeout(None) as patience, load(service.url, CALLERS) as rollouts:
                probe = Probe(service.url, diary, rollouts)
                striker = Striker(diary, lambda: served_after(pusher, probe))
                starts = EngineStarts(service.url, diary, striker.told_to_end)
                async with asyncio.TaskGroup() as group:
                    others = [group.create_task(each.run()) for each in (probe, starts, pusher)]
                    others.append(group.create_task(note_losses(rollouts, diary)))
                    await strike(striker, seed, minutes * 60, lambda blow: say(blow, diary, rollouts))
                    for task in others:
                        task.cancel()
                ended_s = diary.now()
                patience.reschedule(asyncio.get_running_loop().time() + LAST_ANSWERS_S)
        except TimeoutError:
            diary.note("requests given up", after_s=LAST_ANSWERS_S, lost=rollouts.lost[-CALLERS:])
        pusher.look()
    return {
        "seconds": round(ended_s),
        "rollouts": rollouts.rollouts,
        "stale_tokens": len(rollouts.stale),
        "lost_requests": len(rollouts.lost),
        "versions": len(pusher.versions.committed),
        "lost_versions": len(pusher.versions.lost),
        "failed_pushes": pusher.failed,
        "kills": len(striker.blows),
        "not_recovered": sum(blow.waited and blow.whole_s is None for blow in striker.blows),
        **told_of_waits(probe.timeline, ended_s, striker.blows, starts.starts, starts.unserved),
    }


async def note_losses(rollouts: Load, diary: Diary) -> None:
    """Write down what is stale or lost as soon as it is known."""
    noted = {"stale": 0, "lost": 0}
    while True:
        for event, found in (("stale", rollouts.stale), ("lost", rollouts.lost)):
            for told in found[noted[event] :]:
                diary.note(event, told=told[:500])
            noted[event] = len(found)
        await asyncio.sleep(0.1)


async def strike(striker: Striker, seed: int, seconds: float, say: Callable[[Blow], None]) -> None:
    """Strike for so long; at the end every process runs, and the service had the time to be whole again."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await striker.run(strikes(seed), say)
    finally:
        striker.let_all_go_on()
    await striker.wait_for_the_last(say)


def served_after(pusher: Pusher, probe: Probe) -> Callable[[], str]:
    """A check that says what is lacking until a version whose push begins after now has made an answer; "": nothing."""
    wanted = pusher.version + 1

    def lacking() -> str:
        if probe.newest_version >= wanted:
            return ""
        return f"committed is {pusher.versions.newest}, served {probe.newest_version}, and {wanted} is waited for"

    return lacking


def say(blow: Blow, diary: Diary, rollouts: Load) -> None:
    """A line of progress."""
    state = "the next may come on top"
    if blow.waited:
        state = f"whole again after {blow.whole_s:.1f} s" if blow.whole_s is not None else f"not whole: {blow.missing}"
    stopped = f" for {blow.strike.stopped_s:.1f} s" if blow.strike.stopped_s else ""
    counts = f"{rollouts.rollouts} rollouts, {len(rollouts.stale)} stale, {len(rollouts.lost)} lost"
    what = f"{blow.strike.signal}{stopped} to {blow.strike.victim}"
    console.print(
        f"{diary.now():6.0f} s  at {blow.at_s:.1f} s {what}: {state}; {counts}", highlight=False, markup=False
    )


def run(seed: int, minutes: float, replicas: int, diary: Diary) -> Json | None:
    """Run once on a service of its own; return None if it was interrupted."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark  # noqa: TID251 - every process below this one inherits it, and is known by it
    case: Json | None = None
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
            end_as_by_ctrl_c()
            overrides = settings(Path(folder), replicas)
            overrides["scaling"]["gateways"] = replicas
            # versions are pushed as fast as they are taken, and every third aborts what runs
            overrides["engine"]["max_attempts"] = 1000
            with running_service(CPU_DEPLOYMENT, overrides) as service:
                end_as_by_ctrl_c()  # in place of the handler that Ray has put there
                case = asyncio.run(soak(service, seed, minutes, replicas, diary))
    finally:
        left = asyncio.run(gone(mark))
        for process in marked(mark):
            send(process, "SIGKILL")
        diary.note("service ended", left=left)
        if left:
            console.print(f"had to be killed at the end: {', '.join(left)}", markup=False)
    return None if case is None else case | {"orphans": len(left)}


def end_as_by_ctrl_c() -> None:
    """SIGINT and SIGTERM end this process alike: what was started is stopped."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="For so long signals are sent.")] = 20.0,
    seed: Annotated[int, typer.Option(help="What is struck when.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, and gateways.")] = 1,
) -> None:
    """Strike at random, print what it cost, and put the case of this seed into benchmarks/results/.../soak.json."""
    diary = Diary(OUT / f"seed-{seed}-replicas-{replicas}.jsonl")
    console.print(f"starting the service (about a minute), then {minutes:g} minutes; diary: {diary.path}")
    found = run(seed, minutes, replicas, diary)
    diary.close()
    if found is None:
        console.print("interrupted: no result")
        raise typer.Exit(130)
    case = {"seed": seed, "replicas": replicas, "minutes": minutes, "callers": CALLERS} | found
    case["clean"] = is_clean(case)
    cases = results.joined(results.cases("soak"), [case], ("seed", "replicas"))
    path = results.write("soak", {"cases": sorted(cases, key=lambda each: (each["replicas"], each["seed"]))})
    console.print_json(data=case)
    console.print(f"{'clean' if case['clean'] else 'NOT CLEAN'}; added to {path}")
    raise typer.Exit(0 if case["clean"] else 1)


if __name__ == "__main__":
    run_command(main)
