"""All cases, and how they are run one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.adapters import adapter_cases
from benchmarks.faults.broadcasts import broadcast_cases
from benchmarks.faults.ground import Case, Skipped
from benchmarks.faults.inputs import input_cases
from benchmarks.faults.kills import kill_cases
from benchmarks.faults.lifecycle import fleet_cases, term_cases
from benchmarks.faults.nodes import node_cases
from benchmarks.faults.outcome import Outcome, run_case
from benchmarks.faults.storage import storage_cases

MAKERS = kill_cases, term_cases, input_cases, broadcast_cases, storage_cases, adapter_cases, fleet_cases, node_cases


def all_cases() -> Iterator[Case]:
    """Yield the matrix. A case that needs another service than its neighbours names its ``ground``."""
    for make in MAKERS:
        yield from make()


async def run(
    folder: Path, cases: list[Case], say: Callable[[Outcome], None], settings: dict[str, dict[str, Any]] | None = None
) -> list[Outcome]:
    """Run all cases, those in a row with the same ground on one service as long as it survives them.

    ``settings``: laid over those of each service.
    """
    settings = settings or {}
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        say(outcome)

    while len(outcomes) < len(cases):
        first = cases[len(outcomes)]
        place = folder / str(len(outcomes))
        if first.apart is not None:
            tell(await first.apart(place, **settings))
            continue
        try:
            async with first.ground(place, **settings) as ground:
                while len(outcomes) < len(cases) and _shares(first, cases[len(outcomes)]):
                    tell(await run_case(ground, cases[len(outcomes)]))
                    if outcomes[-1].recover_s is None:
                        break  # the next case starts on new ground
        except Skipped as error:
            tell(Outcome(first.name, skipped=str(error)))
    return outcomes


def _shares(first: Case, other: Case) -> bool:
    return other.ground == first.ground and other.apart is None
