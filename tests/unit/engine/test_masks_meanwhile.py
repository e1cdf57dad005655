"""Sampling masks of tokens that a running request has, which only a GPU's engine makes: vLLM's own chunks of them.

All else that is read of a running request is tested with a real engine: ``tests/engine/test_engine.py``.
"""

import numpy as np
from vllm.v1.outputs import SamplingMaskLists

from rollout_service.compat.vllm_internals import _last_masks

CHUNKS = [
    SamplingMaskLists(np.array([1, 2])),  # a step of one token
    SamplingMaskLists(np.array([3, 4, 5, 6]), np.array([0, 1, 3, 4])),  # of three
    SamplingMaskLists(np.array([7])),
]
ALL = [[1, 2], [3], [4, 5], [6], [7]]


def test_they_are_those_of_the_tokens_that_are_new():
    for since in range(6):
        assert _last_masks(CHUNKS, len(ALL) - since) == ALL[since:]
    assert _last_masks([None, *CHUNKS[1:]], 2) == ALL[3:]  # what was told before is not looked at
