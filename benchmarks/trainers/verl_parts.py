"""What verl loads of this project by file and name: the reward, and a replay buffer that looks more often."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from benchmarks.trainers.addition import reward

POLL_S = 0.02


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return 1 for an answer that ends in the sum, else 0."""
    return reward(solution_str, int(ground_truth))


class PromptReplayBuffer(ReplayBufferAsync):
    """verl's replay buffer, which looks for finished rollouts every 2 s, as long as all rollouts of a step here take.

    verl has no option for that, but takes a class: ``trainer.v1.sampler.custom_sampler``.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(poll_interval=POLL_S, **given)
