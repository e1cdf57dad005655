"""Every process killed at every moment, and a proof of the moment in the case's notes."""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.faults.ground import ENGINE_PROCESSES, Case, Ground, below, processes
from benchmarks.faults.update_marker import staged_name
from rollout_service.client import _shared_memory
from rollout_service.client._generate import GenerateOptions
from rollout_service.client._parts import Part, bytes_of_each, cut_parts
from rollout_service.client._tensors import TensorSource
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.upload import BeginUpload
from rollout_service.store.log import WeightLog
from tests.support.moments import MomentMissed, has_mapped, has_open, has_open_memory, resume, stop_at, wait_for
from tests.support.telltale import assert_pure

ATTEMPTS = 10  # versions pushed until a moment is hit
MOMENT_S, COMMIT_S = 3.0, 60.0
LONG, BATCH = 450, 12  # tokens and rollouts


def kill_cases() -> Iterator[Case]:
    """Five processes at six moments, the ingest at those of a pull besides, and a replica that stands still."""
    for victim in (*ENGINE_PROCESSES, "gateway", "ingest"):  # the others have no part in any of these moments
        yield Case(f"kill {victim}, idle", partial(while_idle, victim), concurrency=0)
        yield Case(f"kill {victim}, generating", partial(while_generating, victim))
        staging = partial(in_a_worker, READING) if victim in ENGINE_PROCESSES else while_uploading
        yield Case(f"kill {victim}, staging", partial(staging, victim))
        yield Case(f"kill {victim}, between start and finish of an update", partial(in_a_worker, LOADING, victim))
        yield Case(f"kill {victim}, before the rename", partial(at_the_rename, False, victim))
        yield Case(f"kill {victim}, after the rename", partial(at_the_rename, True, victim))
    yield Case("kill ingest, reading a trainer's memory", while_sharing)
    yield Case("kill ingest, a replica reads the committed version", partial(in_a_worker, READING, "ingest"))
    yield Case("kill ingest, the version is staged and not loaded", partial(in_a_worker, STAGED, "ingest"))
    yield Case("a replica stopped for 30 s", stop_for_a_while)
    for victim in ("replica", "engine core", "gateway"):
        yield Case(f"kill {victim}, under a batch that is carried on", partial(under_a_batch, victim))


async def while_idle(victim: str, ground: Ground) -> None:
    """Kill while no sequence is in any engine."""
    while await _running(ground) != [0] * ground.replicas:
        await asyncio.sleep(0.1)
    await ground.kill(victim)
    ground.note("no sequence was running")


async def while_generating(victim: str, ground: Ground) -> None:
    """Kill while every engine has sequences."""
    while min(running := await _running(ground)) == 0:
        await asyncio.sleep(0.05)
    await ground.kill(victim)
    ground.note(f"{running} sequences were running")


async def under_a_batch(victim: str, ground: Ground) -> None:
    """Kill at a random moment of long rollouts of which the first half is wanted; the rest is carried on afterwards."""
    options = GenerateOptions(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    prompts = [[5 + number, 6, 7] for number in range(BATCH)]
    making = asyncio.create_task(ground.client.generate_batch(prompts, until=BATCH // 2, **options))
    await asyncio.sleep(random.uniform(0.5, 4.0))
    await ground.kill(victim)
    first = await making
    had = {index: each.num_tokens for index, each in first.partial.items()}
    second = await ground.client.generate_batch(list(first.partial.values()), until=len(had), **options)
    rollouts = [*first.rollouts.values(), *second.rollouts.values()]
    if len(rollouts) != BATCH:
        raise AssertionError(f"{len(rollouts)} rollouts of {BATCH} prompts")
    for rollout in rollouts:
        [completion] = rollout.completions
        if len(completion.token_ids) != LONG:
            raise AssertionError(f"{rollout.request_id} has {len(completion.token_ids)} of {LONG} tokens")
        assert_pure(completion)
    several = sum(rollout.attempts > 1 for rollout in rollouts)
    ground.note(f"{several} of {BATCH} rollouts in several pieces; {sum(had.values())} tokens were carried on")


async def _running(ground: Ground) -> list[int]:
    return [replica.running for replica in (await ground.client.fleet()).replicas]


async def while_uploading(victim: str, ground: Ground) -> None:
    """Kill when half of a version's parts are staged; the trainer then sends the version again."""
    version = ground.committed + 1
    await send_half(ground, version)
    staged = await ground.client.weights(version)
    await ground.kill(victim)
    ground.note(f"version {version} was {staged.state} and lacked {len(staged.missing_parts)} parts")
    await push_until_committed(ground, version)


async def while_sharing(ground: Ground) -> None:
    """Kill the ingest after the first of many batches in shared memory; the same push then goes on in parts."""
    version, ingest, sent = ground.committed + 1, processes("ingest")[0], list[tuple[int, int]]()

    def strike(done_bytes: int, total_bytes: int) -> None:
        if not sent:
            ingest.kill()
            ground.killed("ingest", ingest, frozenset())
        sent.append((done_bytes, total_bytes))

    with shared_in_small_batches():
        await ground.push(version, wait="none", progress=strike)
    ground.note(f"{sent[0][0]} of {sent[0][1]} bytes of version {version} had been read")


@contextmanager
def shared_in_small_batches() -> Iterator[None]:
    """The clients of this process share the small model, too, and in many batches."""
    before = _shared_memory.MIN_SHARED_BYTES, _shared_memory.BATCH_BYTES
    _shared_memory.MIN_SHARED_BYTES, _shared_memory.BATCH_BYTES = 0, 64 << 10
    try:
        yield
    finally:
        _shared_memory.MIN_SHARED_BYTES, _shared_memory.BATCH_BYTES = before


WorkerMoment = tuple[Callable[[psutil.Process, Path], bool], str]
"""Whether a worker is in it, by the folder of a new version; and what is known then."""
READING: WorkerMoment = (has_open, "had files of version {} open")
STAGED: WorkerMoment = (
    lambda worker, folder: has_open_memory(worker, staged_name(folder.name)),
    "had staged version {}, and had not begun to load it",
)
LOADING: WorkerMoment = (has_mapped, "had the manifest of version {} mapped")
"""The last two are made visible by ``update_marker``."""


async def in_a_worker(moment: WorkerMoment, victim: str, ground: Ground) -> None:
    """Kill at a moment of a worker, which is of the victim's replica if it has one."""
    is_seen, told = moment

    def aim(version: int) -> Aim:
        replica = random.choice(processes("replica"))
        worker, folder = below(replica, "vllm worker"), ground.log / str(version)
        return Aim(
            stopped=worker,
            begins=lambda: newest(ground) == version,
            reached=lambda: is_seen(worker, folder),
            victim=_of(replica, victim),
            told=f"the worker {told.format(version)}",
        )

    await kill_at(ground, victim, aim)


def _of(replica: psutil.Process, victim: str) -> psutil.Process:
    """The victim that belongs to a replica, or the only one of its kind."""
    return below(replica, victim) if victim in ENGINE_PROCESSES else processes(victim)[0]


async def at_the_rename(after: bool, victim: str, ground: Ground) -> None:
    """Kill when a version's folder is complete: before LATEST names it, or after, when nobody has been told so."""

    def aim(version: int) -> Aim:
        log = WeightLog(ground.log)
        staged, committed = log.staging(version), log.folder(version)

        def complete() -> bool:
            manifest = any((folder / "manifest.json").is_file() for folder in (staged, committed))
            return manifest and newest(ground) < version

        before = f"version {version} had its manifest, LATEST named {newest(ground)}"
        return Aim(
            stopped=processes("ingest")[0],
            begins=staged.is_dir,
            reached=(lambda: newest(ground) == version) if after else complete,
            victim=random.choice(processes(victim)),
            told=f"LATEST named version {version}, its trainer had no answer yet" if after else before,
            unanswered=after,
        )

    await kill_at(ground, victim, aim)


@dataclass(frozen=True)
class Aim:
    """Whom to stop in which state, and whom to kill then."""

    stopped: psutil.Process
    begins: Callable[[], bool]  # from when on it is worth while to look closely
    reached: Callable[[], bool]
    victim: psutil.Process
    told: str  # what is known of the moment, if it is hit
    unanswered: bool = False  # the push must not have been answered by then


async def kill_at(ground: Ground, victim: str, aim_at: Callable[[int], Aim]) -> None:
    """Push versions until one's moment is hit, kill in it, and push on until that version is committed."""
    for _ in range(ATTEMPTS):
        version = ground.committed + 1
        aim = aim_at(version)
        known = await ground.replica_ids()
        pushing = asyncio.create_task(push_until_committed(ground, version))
        hit = await asyncio.to_thread(_strike, aim, pushing)
        if hit:
            ground.killed(victim, aim.victim, known)
            ground.note(aim.told)
        await pushing
        if hit:
            return
    raise MomentMissed(f"{ATTEMPTS} versions were pushed, and the moment was never seen")


def _strike(aim: Aim, pushing: asyncio.Task[None]) -> bool:
    if not wait_for(aim.begins, COMMIT_S) or not stop_at(aim.stopped, aim.reached, MOMENT_S):
        return False
    try:
        if aim.unanswered and pushing.done():
            return False
        aim.victim.kill()
    finally:
        resume(aim.stopped)
    return True


def newest(ground: Ground) -> int:
    head = WeightLog(ground.log).head()
    return -1 if head is None else head.version


async def begin_parts(ground: Ground, version: int) -> list[Part]:
    """Begin a version, and return all parts of it."""
    source = TensorSource(ground.weights(version), None)
    plan = await ground.client._uploader.begin(BeginUpload(version=version, tensors=source.table))
    return list(cut_parts(bytes_of_each(source), plan.part_bytes))


async def send_parts(ground: Ground, version: int, parts: Iterable[Part]) -> None:
    """Send parts in this order, each in a request."""
    for part in parts:
        await ground.put_part(version, part.index, bytes(part.data), part.digest)


async def send_half(ground: Ground, version: int) -> None:
    """Begin a version and send every second part of it, as a trainer that dies half way."""
    parts = await begin_parts(ground, version)
    await send_parts(ground, version, parts[::2])


async def push_until_committed(ground: Ground, version: int, timeout_s: float = 120) -> None:
    """Push as a trainer would that is told of a failure: again, until the service says that it is committed."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await ground.push(version, wait="none")
                return
            except RolloutServiceError:
                await asyncio.sleep(0.5)


async def stop_for_a_while(ground: Ground, seconds: float = 30.0) -> None:
    """A replica and its engine stand still, then go on; a version is pushed meanwhile, and does not wait for them."""
    replica = random.choice(processes("replica"))
    stopped = [replica, *replica.children(recursive=True)]
    ground.settle_s = ground.service.config.weights.dead_after_s + 2  # if Serve replaces it, it stays in the table
    _each(stopped, psutil.Process.suspend)
    pushing = asyncio.create_task(push_until_committed(ground, ground.committed + 1))
    try:
        await asyncio.sleep(seconds)
        still = [process for process in stopped if process.is_running()]
        ground.note(f"{len(still)} of {len(stopped)} processes still there after {seconds:g} s")
        assert pushing.done(), "the push waits for the replica"
    finally:
        _each(stopped, psutil.Process.resume)
    await pushing


def _each(stopped: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in stopped:
        if process.is_running():
            send(process)
