"""Draws which process gets which signal, sends the signals, and waits until the service is whole again."""

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from benchmarks.soak.account import Diary
from tests.support.processes import alive, titled

Signal = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]

TITLES = {  # what is struck → what is in its process's title, from its start on. Ray's own daemons are not among them.
    "replica": "ServeReplica:rollout:engine",
    "engine core": "VLLM::EngineCore",
    "vllm worker": "VLLM::Worker",
    "ingest": "ServeReplica:rollout:ingest",
    "gateway": "ServeReplica:rollout:gateway",
    "monitor": "ServeReplica:rollout:monitor",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}

SIGNALS: tuple[Signal, ...] = ("SIGKILL", "SIGTERM", "SIGSTOP")
LONGEST_PAUSE_S, LONGEST_STOP_S = 10.0, 30.0
BACK_S = 180.0  # after which a strike counts as one that the service did not recover from
LOOK_S = 0.2
WAITS = 0.75  # share of the strikes after which the next one waits until the service is whole again


@dataclass(frozen=True)
class Strike:
    """One signal to one process."""

    pause_s: float  # after the strike before, or after the service was whole again if that one ``waits``
    victim: str  # a key of ``TITLES``
    signal: Signal
    stopped_s: float  # from a SIGSTOP to its SIGCONT; 0 for the other signals
    pick: float  # in [0, 1): which of several processes of that kind
    waits: bool  # whether the next strike waits until the service is whole again, or comes on top of this one


def strikes(seed: int) -> Iterator[Strike]:
    """Strikes without end, the same for the same seed."""
    draw = random.Random(seed)
    while True:
        signal = draw.choice(SIGNALS)
        stopped_s = draw.uniform(0.5, LONGEST_STOP_S)
        yield Strike(
            pause_s=draw.uniform(0, LONGEST_PAUSE_S),
            victim=draw.choice(tuple(TITLES)),
            signal=signal,
            stopped_s=stopped_s if signal == "SIGSTOP" else 0.0,
            pick=draw.random(),
            waits=draw.random() < WAITS,
        )


@dataclass
class Blow:
    """A strike that was carried out, and what came of it."""

    strike: Strike
    pid: int
    at_s: float  # seconds after the beginning of the run
    whole_s: float | None = None
    """Seconds until the service was whole again, of a stop from its end on; None: never, or it was not waited for."""
    waited: bool = False  # whether it was waited until the service was whole
    missing: str = ""  # what was not as it should be after ``BACK_S``


class Striker:
    """Carries out strikes, one after the other, and keeps what came of each."""

    def __init__(self, diary: Diary, unserved: Callable[[], Callable[[], str]]) -> None:
        """``unserved``: called after a strike; what it returns says what of the service is not back, "" if nothing."""
        self._diary, self._unserved = diary, unserved
        self._stopped: list[psutil.Process] = []
        self._last: psutil.Process | None = None
        self.blows: list[Blow] = []

    async def run(self, strikes: Iterator[Strike], say: Callable[[Blow], None]) -> None:
        for strike in strikes:
            await asyncio.sleep(strike.pause_s)
            blow = await self.once(strike)
            if blow is not None:
                say(blow)

    def told_to_end(self) -> set[int]:
        """Return the pids of processes that were struck with SIGTERM or SIGKILL."""
        return {blow.pid for blow in self.blows if blow.strike.signal != "SIGSTOP"}

    async def once(self, strike: Strike) -> Blow | None:
        """Carry out one; None if there is no such process at the moment."""
        found = (await asyncio.to_thread(victims))[strike.victim]
        if not found:
            self._diary.note("nobody to strike", victim=strike.victim)
            return None
        process = found[int(strike.pick * len(found))]
        blow, self._last = Blow(strike, process.pid, self._diary.now()), process
        self.blows.append(blow)
        send(process, strike.signal)
        told = {"victim": strike.victim, "signal": strike.signal, "pid": process.pid, "waits": strike.waits}
        self._diary.note("strike", stopped_s=round(strike.stopped_s, 2), **told)
        if strike.signal == "SIGSTOP":
            self._stopped.append(process)
            asyncio.get_running_loop().call_later(strike.stopped_s, self._let_go_on, process)
        if strike.waits:
            await asyncio.sleep(strike.stopped_s)
            await self._wait_until_whole(blow, process)
        return blow

    async def wait_for_the_last(self, say: Callable[[Blow], None]) -> None:
        """Wait until the service is whole, if nobody has waited for it since the last strike."""
        if self._last is not None and self.blows[-1].whole_s is None:
            await self._wait_until_whole(self.blows[-1], self._last)
            say(self.blows[-1])

    async def _wait_until_whole(self, blow: Blow, struck: psutil.Process) -> None:
        """Wait until every process is there, the struck one is not if it was to end, and the service works."""
        began_s, unserved, blow.waited = self._diary.now(), self._unserved(), True
        ends = None if blow.strike.signal == "SIGSTOP" else struck
        while lacking := await asyncio.to_thread(missing, ends) or unserved():
            blow.missing = lacking
            if self._diary.now() - began_s >= BACK_S:
                self._diary.note("not whole", pid=blow.pid, missing=lacking)
                return
            await asyncio.sleep(LOOK_S)
        blow.whole_s = self._diary.now() - min(blow.at_s + blow.strike.stopped_s, began_s)
        self._diary.note("whole again", pid=blow.pid, after_s=round(blow.whole_s, 2))

    def _let_go_on(self, process: psutil.Process) -> None:
        if process in self._stopped:
            self._stopped.remove(process)
            send(process, "SIGCONT")
            self._diary.note("goes on", pid=process.pid)

    def let_all_go_on(self) -> None:
        for process in [*self._stopped]:
            self._let_go_on(process)


def send(process: psutil.Process, name: str) -> None:
    """The signal of that name, if the process is still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(getattr(signal, name))


def victims() -> dict[str, list[psutil.Process]]:
    """The processes of each kind of ``TITLES``, those that are only starting included."""
    known = titled()
    return {victim: [process for process, title in known if words in title] for victim, words in TITLES.items()}


def missing(ended: psutil.Process | None) -> str:
    """Return which process is not there, or is although it was to end; "": all is well."""
    if ended is not None and alive(ended):
        return f"process {ended.pid} has not ended"
    absent = [victim for victim, found in victims().items() if not found]
    return f"there is no {absent[0]}" if absent else ""
