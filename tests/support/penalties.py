"""Does a completion that goes on have the penalties of one that was not cut?"""

import asyncio

import torch

from rollout_service.engine.adapter import EngineAdapter
from rollout_service.fleet.continuation import continuation_call, slice_completion
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling

LENGTH = 40
COMPARED = 6
"""Tokens after a cut."""


async def whole_with(engine: EngineAdapter, prompt: tuple[int, ...], penalties: dict[str, float]) -> "Cuts":
    """A greedy completion, to be cut after each of its tokens."""
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=20, **penalties)
    call = GenerateCall(request_id="whole", prompt_token_ids=prompt, sampling=sampling)
    [whole] = await engine.generate("whole", prompt, sampling)
    return Cuts(engine, call, whole)


class Cuts:
    """A completion, and what the engine makes of its beginnings."""

    def __init__(self, engine: EngineAdapter, call: GenerateCall, whole: Completion) -> None:
        self._engine, self._call, self._whole = engine, call, whole

    async def differences(self, counted: bool) -> torch.Tensor:
        """|Δ| of the likeliest tokens' logprobs from the whole one's, after each cut while the same tokens follow.

        ``counted``: the engine is told which tokens of the prompt are the completion's.
        """
        found = await asyncio.gather(*(self._after(cut, counted) for cut in range(1, LENGTH)))
        return torch.tensor([each for differences in found for each in differences])

    async def _after(self, cut: int, counted: bool) -> list[float]:
        rest = continuation_call(self._call, slice_completion(self._whole, 0, cut), 2)
        length = min(COMPARED, LENGTH - cut)
        [made] = await self._engine.generate(
            f"after-{cut}-{counted}",
            rest.prompt_token_ids,
            rest.sampling.model_copy(update={"max_tokens": length}),
            partial_tokens=rest.partial_tokens if counted else 0,
        )
        assert made.top_logprobs is not None and self._whole.top_logprobs is not None
        found = []
        for at in range(length):
            there = {each.token_id: each.logprob for each in self._whole.top_logprobs[cut + at]}
            here = [each for each in made.top_logprobs[at] if each.token_id in there]
            found += [abs(each.logprob - there[each.token_id]) for each in here]
            if made.token_ids[at] != self._whole.token_ids[cut + at]:
                break
        return found
