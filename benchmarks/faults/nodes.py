"""A Ray node without the log is killed, or drained, and another one joins; or the ingest dies while it copies.

    python -m benchmarks.faults.nodes FOLDER CASE SETTINGS

Each needs a cluster of its own, so it runs in a process of its own and prints what it found as a line of JSON.
"""

import asyncio
import contextlib
import filecmp
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.ground import CONCURRENCY, Case, Ground, Skipped, load, processes
from benchmarks.faults.kills import Aim, kill_at, push_until_committed
from benchmarks.faults.outcome import RECOVERY_S, Outcome
from rollout_service.client import RolloutClient
from rollout_service.store.log import WeightLog
from tests.support.moments import has_open
from tests.support.two_nodes import HEAD, Nodes, service_on_two_nodes

KILLED = "kill a node without the log, generating"
DRAINED = "drain a node without the log, generating"
COPYING = "kill ingest, a node without the log copies the version"
FIRST, SECOND = "second", "third"  # nodes beside the head, one after the other
NOTICE_S = 300  # between the drain of a node and its end; an engine starts in less


@dataclass
class NodesOutcome(Outcome):
    """One line of the matrix, and what reached the nodes without the log."""

    copied_versions: list[int] = field(default_factory=list)
    """Versions that reached a node through the object store, whole."""


def node_cases() -> Iterator[Case]:
    for name in (KILLED, DRAINED, COPYING):
        yield Case(name, on_the_common_ground, apart=partial(run_apart, name))


async def on_the_common_ground(_: Ground) -> None:
    """Never: there is one node."""
    raise Skipped("it needs two nodes")


async def run_apart(name: str, folder: Path, **settings: dict[str, Any]) -> NodesOutcome:
    """Run the case of that name below ``folder``, in a process of its own. Raises RuntimeError if that fails."""
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_folder:  # short: sockets lie in it
        process = await asyncio.create_subprocess_exec(
            # Ray notes a cluster's address there, where any other ray.init() on this machine would find it
            *("env", f"RAY_TMPDIR={ray_folder}"),
            *(sys.executable, "-m", "benchmarks.faults.nodes", str(folder), name, json.dumps(settings)),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the service on two nodes ended with status {process.returncode}")
    return NodesOutcome(**json.loads(output.splitlines()[-1]))


async def two_nodes(folder: Path, name: str, settings: dict[str, dict[str, Any]]) -> NodesOutcome:
    """Run one of the cases, under load."""
    outcome = NodesOutcome(name)
    fault = {KILLED: _kill_and_replace, DRAINED: _drain_and_replace, COPYING: _kill_ingest_copying}[name]
    with service_on_two_nodes(folder, FIRST, settings) as (service, nodes):
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(RolloutClient(service.url, retries=12))
            place = Ground(service, client, committed=0)
            await place.push(1)
            _note_copy(outcome, nodes, FIRST, 1)
            async with load(service.url, CONCURRENCY, place.kv_max_age) as rollouts:
                try:
                    outcome.recover_s = await fault(place, nodes, outcome)
                except AssertionError as error:
                    outcome.notes.append(str(error))
            outcome.survived = outcome.recover_s is not None and not outcome.notes
            await outcome.count(place, rollouts)
    return outcome


async def _drain_and_replace(place: Ground, nodes: Nodes, outcome: NodesOutcome) -> float | None:
    """Seconds until the drained node's replica was replaced. There were two that served all the time."""
    nodes.add(SECOND)
    place.replaced, drained = await place.replica_ids(), time.perf_counter()
    nodes.drain(FIRST, NOTICE_S)
    watching = asyncio.create_task(_fewest_serving(place))
    await place.push(2, wait="none")
    whole_s = await place.recovered(drained, NOTICE_S)
    watching.cancel()
    if whole_s is None:
        outcome.notes.append(f"the replica on the drained node was not replaced within {NOTICE_S} s")
        return None
    _note_copy(outcome, nodes, SECOND, 2)
    await place.push(3)
    _note_copy(outcome, nodes, SECOND, 3)
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return whole_s


async def _kill_and_replace(place: Ground, nodes: Nodes, outcome: NodesOutcome) -> float | None:
    """Seconds until the replica that is left served a new version alone, plus those until there were two again."""
    for version in (2, 3):
        await place.push(version)
        _note_copy(outcome, nodes, FIRST, version)
    killed = time.perf_counter()
    nodes.kill(FIRST)
    await push_until_committed(place, 4)  # the gateway may have been there, too
    await place.until_fleet(
        lambda fleet: [r.version for r in fleet.replicas if r.state == "ready"] == [4], "goes on with one replica"
    )
    alone_s = time.perf_counter() - killed
    joined = time.perf_counter()
    nodes.add(SECOND)
    whole_s = await place.recovered(joined, RECOVERY_S)
    if whole_s is None:
        return None
    _note_copy(outcome, nodes, SECOND, 4)
    await place.push(5)
    _note_copy(outcome, nodes, SECOND, 5)
    return alone_s + whole_s


async def _kill_ingest_copying(place: Ground, nodes: Nodes, outcome: NodesOutcome) -> float | None:
    """Seconds until both replicas serve a version of which one's node had some bytes when the ingest was killed."""
    original, copies = WeightLog(nodes.root(HEAD)), nodes.copies(FIRST)
    [replica] = [process for process in processes("replica") if has_open(process, nodes.root(FIRST))]

    def copied_bytes(version: int) -> int:
        return sum(path.stat().st_size for path in copies.root.glob(f"staging/{version}-*/*"))

    def aim(version: int) -> Aim:
        return Aim(
            stopped=replica,
            begins=lambda: (head := original.head()) is not None and head.version == version,
            reached=lambda: 0 < copied_bytes(version) < _weights_bytes(original.folder(version)),
            victim=processes("ingest")[0],
            told=f"the node had some bytes of version {version}, and lacked others",
        )

    began = time.perf_counter()
    await kill_at(place, "ingest", aim)
    whole_s = await place.recovered(began, RECOVERY_S)
    if whole_s is None:
        return None
    _note_copy(outcome, nodes, FIRST, place.committed)
    await place.push(place.committed + 1)
    _note_copy(outcome, nodes, FIRST, place.committed)
    return whole_s


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


async def _fewest_serving(place: Ground) -> None:
    """Raise AssertionError once fewer than two replicas take requests; no answer says nothing."""
    while True:
        fleet = await place.fleet()
        states = [] if fleet is None else [replica.state for replica in fleet.replicas]
        assert fleet is None or sum(state in ("ready", "syncing") for state in states) >= 2, states
        await asyncio.sleep(0.1)


def _note_copy(outcome: NodesOutcome, nodes: Nodes, name: str, version: int) -> None:
    """The node's own copy of a version that all serve must be the newest there and the same as in the log."""
    copies, original = nodes.copies(name), WeightLog(nodes.root(HEAD))
    head = copies.head()
    files = [path.name for path in original.folder(version).iterdir()]
    same, *different = filecmp.cmpfiles(original.folder(version), copies.folder(version), files, shallow=False)
    if head is None or head.version != version or any(different) or not same:
        outcome.notes.append(f"{name}: version {version} is not whole: LATEST {head}, differing {different}")
    else:
        outcome.copied_versions.append(version)


if __name__ == "__main__":
    found = asyncio.run(two_nodes(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
    print(json.dumps(asdict(found)), flush=True)
