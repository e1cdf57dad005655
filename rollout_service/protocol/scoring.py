"""Calls from the gateway to the shadow engine, which scores completions."""

from rollout_service.protocol.base import Frozen


class ScoreCall(Frozen):
    """One completion that one version sampled from end to end on one replica."""

    version: int
    replica_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """[tokens]"""
    logprobs: tuple[float, ...]
    """[tokens], natural logs, as the replica sampled them."""

    @property
    def cost_tokens(self) -> int:
        """Return the number of tokens to prefill for scoring."""
        return len(self.prompt_token_ids) + len(self.token_ids)
