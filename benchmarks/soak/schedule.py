"""Which process gets which signal, drawn from a seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Signal = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]

TITLES = {
    "replica": "ServeReplica:rollout:engine",
    "engine core": "VLLM::EngineCore",
    "vllm worker": "VLLM::Worker",
    "ingest": "ServeReplica:rollout:ingest",
    "gateway": "ServeReplica:rollout:gateway",
    "monitor": "ServeReplica:rollout:monitor",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}
"""What is struck → what is in its process's title, from its start on. Ray's own daemons are not among them."""

SIGNALS: tuple[Signal, ...] = ("SIGKILL", "SIGTERM", "SIGSTOP")
LONGEST_PAUSE_S, LONGEST_STOP_S = 10.0, 30.0
WAITS = 0.75
"""Share of the strikes after which the next one waits until the service is whole again."""


@dataclass(frozen=True)
class Strike:
    """One signal to one process."""

    pause_s: float
    """After the strike before, or after the service was whole again if that one ``waits``."""
    victim: str
    """A key of ``TITLES``."""
    signal: Signal
    stopped_s: float
    """From a SIGSTOP to its SIGCONT; 0 for the other signals."""
    pick: float
    """In [0, 1): which of several processes of that kind."""
    waits: bool
    """Whether the next strike waits until the service is whole again, or comes on top of this one."""


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
