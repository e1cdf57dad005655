"""What a client got, against what this project's own client gets of the native route for the same prompt."""

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_service.client import RolloutClient

LOGPROB_TOLERANCE = 1e-4


async def assert_as_native(
    client: RolloutClient,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    **sampling: Any,
) -> None:
    """``/inference/v1/generate`` samples the same greedy tokens, with the same logprobs, all of ``version``.

    ``sampling``: what the client asked for beside that, if it changes logprobs.
    """
    assert len(token_ids) == len(logprobs) > 0
    native = await client.generate(
        tuple(prompt_token_ids), temperature=0.0, max_tokens=len(token_ids), ignore_eos=True, **sampling
    )
    [completion] = native.completions
    assert completion.versions == (version,)
    assert tuple(token_ids) == completion.token_ids
    assert list(logprobs) == pytest.approx(completion.logprobs, abs=LOGPROB_TOLERANCE)
