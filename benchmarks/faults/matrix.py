"""All cases, and how they are run one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.adapters import adapter_cases
from benchmarks.faults.broadcasts import broadcast_cases
from benchmarks.faults.disk import disk_cases
from benchmarks.faults.files import file_cases
from benchmarks.faults.ground import Case, Skipped
from benchmarks.faults.inputs import input_cases
from benchmarks.faults.kills import kill_cases
from benchmarks.faults.nodes import node_cases
from benchmarks.faults.outcome import Outcome, run_case
from benchmarks.faults.scale import scale_cases
from benchmarks.faults.terms import only_replica_cases, term_cases


def all_cases() -> Iterator[Case]:
    """The matrix. A case that needs another service than its neighbours names its ``ground``."""
    yield from kill_cases()
    yield from term_cases()
    yield from input_cases()
    yield from broadcast_cases()
    yield from file_cases()
    yield from disk_cases()
    yield from adapter_cases()
    yield from only_replica_cases()
    yield from scale_cases()
    yield from node_cases()


async def run(
    folder: Path,
    cases: list[Case],
    say: Callable[[Outcome], None],
    settings: dict[str, dict[str, Any]] | None = None,
) -> list[Outcome]:
    """All cases, those in a row with the same ground on one service as long as it survives them.

    ``settings``: laid over those of each service.
    """
    settings = settings or {}
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        say(outcome)

    while len(outcomes) < len(cases):
        first = cases[len(outcomes)]
        if first.apart is not None:
            tell(await first.apart(folder / str(len(outcomes)), **settings))
            continue
        try:
            async with first.ground(folder / str(len(outcomes)), **settings) as place:
                while len(outcomes) < len(cases) and _shares(first, cases[len(outcomes)]):
                    tell(await run_case(place, cases[len(outcomes)]))
                    if outcomes[-1].recover_s is None:
                        break  # the next case starts on new ground
        except Skipped as error:
            tell(Outcome(first.name, skipped=str(error)))
    return outcomes


def _shares(first: Case, other: Case) -> bool:
    return other.ground == first.ground and other.apart is None
