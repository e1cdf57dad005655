"""vLLM's sampling masks on a GPU: an engine's truncated logprobs are the reference's, renormalized over them."""

import asyncio

import pytest
import torch

from rollout_service.correction import SamplingSupport, correct, preset
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.errors import InvalidRequest
from rollout_service.fleet.continuation import merge_completions, slice_completion
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.protocol.sampling_mask import unpack
from tests.support.models import random_weights
from tests.support.one_engine import PROMPTS, running
from tests.support.reference import reference_model

SAMPLINGS = [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.02}, {"top_k": 8, "min_tokens": 4}]
"""Of the model's random weights each leaves a small part of the probability."""
BF16_MEAN = 0.02
"""Mean |lr| in nats of an engine without quantization, as tests/engine/test_round_trip.py has it."""


async def test_truncated_logprobs_match_the_model_over_the_kept_tokens(tmp_path, monkeypatch):
    settings = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "return_sampling_mask": True}
    async with running("qwen3", tmp_path, monkeypatch, quant="none", **settings) as one:
        folder = await one.update(1, random_weights(one.config.model.path, seed=1))
        model = reference_model(one.config.model.path, folder, fp8_activations=False, fp8_kv=False)
        for sampling in SAMPLINGS:
            completions = await one.engine.generate(
                str(sampling), PROMPTS[0], Sampling(n=8, max_tokens=16, ignore_eos=True, **sampling)
            )
            support = SamplingSupport.of(completions)
            sampled = torch.tensor([completion.token_ids for completion in completions])
            whole = torch.cat([torch.tensor([PROMPTS[0]] * len(completions)), sampled], 1)
            with torch.no_grad():
                logits = model(whole[:, :-1]).logits[:, -sampled.shape[1] :].float()
            rollout = torch.tensor([completion.logprobs for completion in completions])
            mask = torch.ones_like(sampled)
            assert 1 <= support.kept.sum(-1).max() <= sampling["top_k"]
            renormalized = correct(support.renormalized(logits, sampled), rollout, mask, preset("token_tis")).metrics
            plain = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
            distance = "rollout_corr/rollout_train_logprobs_abs_diff_mean"
            assert renormalized[distance] < BF16_MEAN
            assert correct(plain, rollout, mask).metrics[distance] > 10 * BF16_MEAN
        await assert_what_is_read_meanwhile_has_its_masks(one.engine)
        with pytest.raises(InvalidRequest, match="top_k > 0"):
            await one.engine.generate("whole", PROMPTS[0], Sampling(max_tokens=2))


async def assert_what_is_read_meanwhile_has_its_masks(engine: EngineAdapter) -> None:
    """The pieces of rollouts that are under way, joined, are the beginning of what comes in the end."""
    sampling = Sampling(n=4, max_tokens=64, ignore_eos=True, top_k=5)
    empty = {"token_ids": (), "logprobs": (), "finish_reason": "abort", "spans": ()}
    made = [Completion(index=index, **empty) for index in range(sampling.n)]
    call = GenerateCall(request_id="meanwhile", prompt_token_ids=PROMPTS[0], sampling=sampling)
    making = asyncio.create_task(engine.generate("meanwhile", PROMPTS[0], sampling))
    while not making.done():
        for piece in engine.tokens_since("meanwhile", [len(each.token_ids) for each in made]):
            made[piece.index] = merge_completions(call, made[piece.index], piece)
        await asyncio.sleep(0)
    for whole in await making:
        read = made[whole.index]
        length = len(read.token_ids)
        assert length > 0 and (read.token_ids, read.logprobs) == (whole.token_ids[:length], whole.logprobs[:length])
        told, begin = (
            unpack(read.packed_sampling_mask or ()),
            unpack(slice_completion(whole, 0, length).packed_sampling_mask or ()),
        )
        assert [each.tolist() for each in told] == [each.tolist() for each in begin]
