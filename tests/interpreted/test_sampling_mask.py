"""vLLM's own kernel for sampling masks, run by Triton's interpreter: what it returns is what we pack.

On the CPU vLLM puts a stand-in where Triton would be; here its kernel is compiled by the real one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.v1.worker.gpu.sample import output

from rollout_service.engine.adapter import packed_mask
from rollout_service.errors import EngineFailed
from rollout_service.protocol.sampling_mask import unpack


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "tl", triton.language)
    monkeypatch.setattr(output, "triton", SimpleNamespace(cdiv=triton.cdiv))
    kernel = output._compact_sampling_mask_kernel
    monkeypatch.setattr(output, "_compact_sampling_mask_kernel", triton.jit(getattr(kernel, "fn", kernel)))


def logits(kept: list[list[int]], vocabulary: int = 20_000) -> torch.Tensor:
    """As top-k and top-p leave them: −inf for what was cut off."""
    rows = torch.full((len(kept), vocabulary), -torch.inf)
    for row, ids in enumerate(kept):
        rows[row, ids] = torch.randn(len(ids))
    return rows


def made(token_ids: list[int], kept: list[list[int]]) -> CompletionOutput:
    """As vLLM hands a finished completion over."""
    mask = SamplingMask(kept)
    return CompletionOutput(0, "", token_ids, cumulative_logprob=None, logprobs=None, sampling_mask=mask)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("top_k", [3, 1])
def test_vllm_mask_ids_are_ascending_and_survive_packing(top_k):
    """With ``top_k`` 1 most rows have more ids than vLLM's compact form has room for, as with equal logits."""
    kept = [[19_999, 3, 8_192], [7], [8_191, 12_345], [0, 1]]
    first, sampled = torch.arange(len(kept) + 1, dtype=torch.int32), torch.ones(len(kept), dtype=torch.int32)
    masks = output.SamplingMaskTensors.from_logits(logits(kept), first, sampled, top_k).tolists()
    packed = packed_mask(made([19_999, 7, 12_345, 0], masks.to_nested_list()))
    assert packed is not None
    counts, ids = unpack(packed)
    assert counts.tolist() == [3, 1, 2, 2]
    np.testing.assert_array_equal(ids, np.concatenate([sorted(row) for row in kept]))


def test_a_mask_not_as_long_as_its_completion_fails_the_request():
    with pytest.raises(EngineFailed, match="sampling masks of 1 tokens for a completion of 2"):
        packed_mask(made([1, 2], [[1]]))
