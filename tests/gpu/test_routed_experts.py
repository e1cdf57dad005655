"""vLLM's routed experts on a GPU: they are those of a forward pass, whatever happened to the rollout on the way."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollout_service.errors import InvalidRequest
from rollout_service.fleet.continuation import continuation_call, merge_completions
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.routed_experts import Experts, Known
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.support.models import NUM_EXPERTS, random_weights
from tests.support.one_engine import PROMPTS, OneEngine, running
from tests.support.reference import reference_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
MARGIN = 0.02
"""Between the probabilities of the last expert chosen and the first one not: BF16 does not turn it round here."""
LONG_TOKENS = 900
FROM_0 = Sampling(max_tokens=24, ignore_eos=True, routed_experts_prompt_start=0)
LONG = Sampling(max_tokens=LONG_TOKENS, ignore_eos=True, routed_experts_prompt_start=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneEngine]:
    """In CUDA graphs, with prefix caching, in BF16: no rounding to FP8 moves a router's decision."""
    folder = tmp_path_factory.mktemp("routed")
    settings = {"gpu_memory_utilization": 0.1, "return_routed_experts": True, "max_num_batched_tokens": 64}
    settings |= {"max_model_len": 1024, "max_num_seqs": 8}
    with pytest.MonkeyPatch.context() as patch:
        async with running("qwen3_moe", folder, patch, quant="none", cuda_graph_sizes=(1, 8), **settings) as engine:
            yield engine


async def updated(one: OneEngine, seed: int) -> torch.nn.Module:
    """The engine has another version; the reference of it."""
    folder = await one.update(one.newest + 1, random_weights(one.config.model.path, seed=seed))
    return reference_model(one.config.model.path, folder, fp8_activations=False, fp8_kv=False)


def told(prompt: tuple[int, ...], completion: Completion) -> tuple[Experts, Known]:
    assert completion.routed_experts is not None
    experts, known = completion.routed_experts.unpacked(len(prompt) + len(completion.token_ids))
    assert (np.sort(experts[known])[..., 1:] != np.sort(experts[known])[..., :-1]).all()  # no expert twice
    assert experts.max() < NUM_EXPERTS
    return experts, known


def of_a_forward_pass(model: torch.nn.Module, tokens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Experts [tokens, layers, topk], ascending, and bool [tokens, layers], whether another dtype may choose others."""
    logits: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    ranked = torch.stack(logits, 1).softmax(-1).sort(dim=-1, descending=True)
    topk = model.config.num_experts_per_tok
    tiny = ranked.values[..., topk - 1] - ranked.values[..., topk] < MARGIN
    return ranked.indices[..., :topk].sort(dim=-1).values.numpy(), tiny.numpy()


def assert_same(
    model: torch.nn.Module, tokens: tuple[int, ...], experts: Experts, known: Known, least: float = 0.9
) -> None:
    """What is known is the model's choice; ``least``: the share of it that is decisive enough to be compared."""
    expected, tiny = of_a_forward_pass(model, tokens)
    compared = known[:, None] & ~tiny
    assert compared.sum() > least * known.sum() * tiny.shape[1]
    assert (np.sort(experts, -1)[compared] == expected[compared]).all()


async def test_they_are_those_of_a_forward_pass(one):
    """Prompts are longer than a step of 64 tokens, and of several completions; the second time they are cached."""
    model = await updated(one, seed=1)
    prompts = [tuple(range(3, 103)), *PROMPTS[:3]]
    for again in ("first", "cached"):
        calls = [
            one.engine.generate(f"{again}-{i}", prompt, FROM_0.model_copy(update={"n": 3}))
            for i, prompt in enumerate(prompts)
        ]
        for prompt, completions in zip(prompts, await asyncio.gather(*calls), strict=True):
            for completion in completions:
                experts, known = told(prompt, completion)
                assert known.tolist() == [True] * (len(known) - 1) + [False]
                assert_same(model, prompt + completion.token_ids, experts, known)


async def test_they_begin_where_they_are_asked_for_and_only_for_who_asks(one):
    model, prompt = await updated(one, seed=2), PROMPTS[4]
    for start in (1, len(prompt) - 1, len(prompt)):
        sampling = FROM_0.model_copy(update={"routed_experts_prompt_start": start})
        [completion] = await one.engine.generate(f"from-{start}", prompt, sampling)
        experts, known = told(prompt, completion)
        assert known.nonzero()[0].tolist() == list(range(start, len(known) - 1))
        assert_same(model, prompt + completion.token_ids, experts, known)
    [without] = await one.engine.generate("without", prompt, Sampling(max_tokens=4))
    assert without.routed_experts is None
    with pytest.raises(InvalidRequest, match="routed_experts_prompt_start must be between 0 and"):
        await one.engine.generate("beyond", (5, 6), FROM_0.model_copy(update={"routed_experts_prompt_start": 3}))


async def begun(one: OneEngine, prompt: tuple[int, ...], name: str) -> "asyncio.Task[tuple[Completion, ...]]":
    """A long completion that has its first token."""
    task = asyncio.create_task(one.engine.generate(name, prompt, LONG))
    while one.engine.scheduler.load(1, 0).running == 0:
        await asyncio.sleep(0.005)
    return task


async def test_an_abort_and_its_continuation_leave_no_gap(one):
    model, prompt = await updated(one, seed=3), PROMPTS[5]
    task = await begun(one, prompt, "long")
    await one.engine.abort()
    [partial] = await task
    assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < LONG_TOKENS
    call = GenerateCall(request_id="long", prompt_token_ids=prompt, sampling=LONG)
    rest = continuation_call(call, partial, 2)
    [made] = await one.engine.generate(rest.request_id, rest.prompt_token_ids, rest.sampling)
    assert made.routed_experts is not None and made.routed_experts.start == len(rest.prompt_token_ids) - 1
    whole = merge_completions(call, partial, made)
    experts, known = told(prompt, whole)
    assert len(whole.token_ids) == LONG_TOKENS and known.tolist() == [True] * (len(known) - 1) + [False]
    assert_same(model, prompt + whole.token_ids, experts, known)


async def test_an_update_leaves_what_the_old_weights_chose(one):
    """The KV cache is computed anew with the new weights; the tokens of before keep what they were sampled with."""
    old, prompt = await updated(one, seed=4), PROMPTS[6]
    folder = await one.commit(one.newest + 1, random_weights(one.config.model.path, seed=5))
    new = reference_model(one.config.model.path, folder, fp8_activations=False, fp8_kv=False)
    await one.engine.stage(folder)
    task = await begun(one, prompt, "over")
    await one.engine.pause("keep")
    await one.engine.load(folder, one.newest)
    await one.engine.resume()
    [completion] = await task
    assert len(completion.spans) == 2
    experts, known = told(prompt, completion)
    assert known[:-1].all()
    seam = len(prompt) + completion.spans[0].end - 1  # the first token that the new weights read
    before, after = known.copy(), known.copy()
    before[seam:], after[:seam] = False, False
    assert_same(old, prompt + completion.token_ids, experts, before)
    assert_same(new, prompt + completion.token_ids, experts, after)
