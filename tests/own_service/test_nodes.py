"""Two Ray nodes on this machine, of which one does not see the log."""

from benchmarks.faults.nodes import DRAINED, KILLED, run_apart


async def test_a_node_without_the_log_updates_and_dies_without_loss(tmp_path):
    outcome = await run_apart(KILLED, tmp_path)
    assert outcome.copied_versions == [1, 2, 3, 4, 5]
    assert outcome.notes == [] and outcome.survived
    assert (outcome.stale_tokens, outcome.lost_requests, outcome.lost_versions) == (0, 0, 0)
    assert outcome.rollouts > 0


async def test_draining_a_node_replaces_its_replica_first_without_loss(tmp_path):
    outcome = await run_apart(DRAINED, tmp_path)
    assert outcome.copied_versions == [1, 2, 3]
    assert outcome.notes == [] and outcome.survived
    assert (outcome.stale_tokens, outcome.lost_requests, outcome.lost_versions) == (0, 0, 0)
    assert outcome.rollouts > 0
