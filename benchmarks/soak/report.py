"""A run as a case of the results' file."""

from collections.abc import Sequence

from benchmarks.common.results import Json
from benchmarks.faults.ground import ENGINE_PROCESSES
from benchmarks.soak.account import Timeline
from benchmarks.soak.engines import EngineStart
from benchmarks.soak.strike import Blow

NOTED_S = 1.0  # gaps between answers up to this are a busy machine's
BEFORE_S = 2.0  # a strike so long before the last answer may have caused the gap after it: the answer was on its way


def told_of_waits(
    timeline: Timeline,
    ended_s: float,
    blows: Sequence[Blow],
    starts: Sequence[EngineStart],
    unserved: Sequence[tuple[float, float]],
) -> Json:
    """Return the longest time without service, what outages cost beyond the start of an engine, and how long they were
    while an engine lived."""
    beyond, beside = 0.0, 0.0
    of_engines = [blow.at_s for blow in blows if blow.strike.victim in ENGINE_PROCESSES]
    for outage in timeline.outages(ended_s, NOTED_S):
        lost_s = sum(max(0.0, min(until, outage.until_s) - max(since, outage.from_s)) for since, until in unserved)
        beside = max(beside, outage.seconds - lost_s)
        ending = [start for start in starts if outage.from_s <= start.ready_s <= outage.until_s + NOTED_S]
        if ending:
            struck = (at_s for at_s in of_engines if outage.from_s - BEFORE_S <= at_s <= outage.until_s)
            since_s = max([outage.from_s, *struck])
            beyond = max(beyond, outage.until_s - since_s - ending[0].seconds)
    return {
        "longest_outage_s": round(timeline.longest(ended_s).seconds, 2),
        "longest_beyond_a_start_s": round(beyond, 2),
        "longest_with_a_live_engine_s": round(beside, 2),
        "engine_starts": len(starts),
    }


def is_clean(case: Json) -> bool:
    """Return True if nothing was stale, lost, away for ever, or left behind."""
    counts = ("stale_tokens", "lost_requests", "lost_versions", "not_recovered", "orphans")
    return not any(case[count] for count in counts)
