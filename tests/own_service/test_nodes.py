"""Two Ray nodes on this machine, of which one does not see the log."""

from pathlib import Path

import pytest

from benchmarks.faults.nodes import DRAINED, KILLED, run_apart


@pytest.mark.slow
async def test_a_node_without_the_log_gets_every_version_and_its_death_loses_nothing_but_its_replica(
    tmp_path: Path,
) -> None:
    outcome = await run_apart(KILLED, tmp_path)
    assert outcome.copied_versions == [1, 2, 3, 4, 5]
    assert outcome.notes == [] and outcome.survived
    assert (outcome.stale_tokens, outcome.lost_requests, outcome.lost_versions) == (0, 0, 0)
    assert outcome.rollouts > 0


@pytest.mark.slow
async def test_a_drained_node_s_replica_is_replaced_before_it_stops_and_nothing_is_lost(tmp_path: Path) -> None:
    outcome = await run_apart(DRAINED, tmp_path)
    assert outcome.copied_versions == [1, 2, 3]
    assert outcome.notes == [] and outcome.survived
    assert (outcome.stale_tokens, outcome.lost_requests, outcome.lost_versions) == (0, 0, 0)
    assert outcome.rollouts > 0
