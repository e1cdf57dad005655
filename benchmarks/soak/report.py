"""A run as a case of the results' file."""

import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.common.results import Json
from benchmarks.faults.ground import ENGINE_PROCESSES
from benchmarks.soak.account import Outage, Timeline
from benchmarks.soak.engines import EngineStart
from benchmarks.soak.schedule import SIGNALS
from benchmarks.soak.strike import Blow

NOTED_S = 1.0
"""Gaps between answers up to this are a busy machine's."""
TOLD_S = 5.0
"""Longer outages are listed."""
BEFORE_S = 2.0
"""A strike so long before the last answer may have caused the gap after it: the answer was on its way."""


def told_of_blows(blows: Sequence[Blow]) -> Json:
    """How many there were, and after how many the service did not come back."""
    return {
        "kills": len(blows),
        "kills_by_signal": dict(Counter(blow.strike.signal for blow in blows)),
        "kills_by_victim": dict(Counter(blow.strike.victim for blow in blows)),
        "not_recovered": sum(blow.waited and blow.whole_s is None for blow in blows),
    }


def told_of_outages(timeline: Timeline, ended_s: float, blows: Sequence[Blow]) -> Json:
    """Return the longest times without service, what was struck in each, and the longest after a single strike."""
    longest, alone = timeline.longest(ended_s), dict.fromkeys(SIGNALS, 0.0)
    outages = timeline.outages(ended_s, NOTED_S)
    for outage in outages:
        struck = struck_within(outage, blows)
        if len(struck) == 1:
            signal = struck[0].strike.signal
            alone[signal] = max(alone[signal], round(outage.seconds, 2))
    return {
        "longest_outage_s": round(longest.seconds, 2),
        "outages": [
            {
                "from_s": round(outage.from_s, 2),
                "seconds": round(outage.seconds, 2),
                "struck": [
                    f"{blow.at_s:.1f} s: {blow.strike.signal} to {blow.strike.victim}"
                    for blow in struck_within(outage, blows)
                ],
            }
            for outage in outages
            if outage.seconds > TOLD_S
        ],
        "longest_outage_by_one_signal_s": alone,
    }


def struck_within(outage: Outage, blows: Sequence[Blow]) -> list[Blow]:
    """Those that may have caused the outage, or lengthened it."""
    return [blow for blow in blows if outage.from_s - BEFORE_S <= blow.at_s <= outage.until_s]


def told_of_waits(
    timeline: Timeline,
    ended_s: float,
    blows: Sequence[Blow],
    starts: Sequence[EngineStart],
    unserved: Sequence[tuple[float, float]],
) -> Json:
    """Return what outages cost beyond the start of an engine, and how long they were while an engine lived.

    A strike at an engine that starts makes the start begin anew, so the time counts from the last such strike.
    """
    beyond, beside = 0.0, 0.0
    for outage in timeline.outages(ended_s, NOTED_S):
        lost_s = sum(max(0.0, min(until, outage.until_s) - max(since, outage.from_s)) for since, until in unserved)
        beside = max(beside, outage.seconds - lost_s)
        struck = [blow.at_s for blow in struck_within(outage, blows) if blow.strike.victim in ENGINE_PROCESSES]
        ending = [start for start in starts if outage.from_s <= start.ready_s <= outage.until_s + NOTED_S]
        if ending:
            since_s = max([outage.from_s, *struck])
            beyond = max(beyond, outage.until_s - since_s - ending[0].seconds)
    return {"longest_beyond_a_start_s": round(beyond, 2), "longest_with_a_live_engine_s": round(beside, 2)}


def told_of_starts(seconds: Sequence[float]) -> Json:
    """How long engines took to start."""
    return {
        "engine_starts": len(seconds),
        "engine_start_s": round(statistics.median(seconds), 2) if seconds else None,
        "engine_start_max_s": round(max(seconds), 2) if seconds else None,
    }


def is_clean(case: Json) -> bool:
    """Whether nothing was stale, lost, away for ever, or left behind."""
    counts = ("stale_tokens", "lost_requests", "lost_versions", "not_recovered", "orphans")
    return not any(case[count] for count in counts)
