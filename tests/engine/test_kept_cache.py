"""A KV cache that outlives updates: which keys and values do tokens read, by their logprobs?

The reference is a forward pass of several models: each writes the keys and values of some positions, and the next one
continues with them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache, PreTrainedModel

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter, completion, vllm_sampling
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.store.log import WeightLog
from tests.engine.test_engine import BF16_MEAN, commit_weights, committed, lively_weights, running_engine
from tests.support.reference import reference_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
BLOCK, CHUNK = 32, 64
PROMPT = tuple(5 + 7 * at % 100 for at in range(4 * BLOCK))
LONG = Sampling(max_tokens=300, ignore_eos=True)
SHORT = Sampling(max_tokens=8, ignore_eos=True)
OTHER = 10 * BF16_MEAN
"""A lower bound for the mean |Δ| from a reference whose keys and values have other weights."""
VERSIONS = range(4)


class Kept:
    """An engine that keeps its cache for one version, and what its versions compute."""

    def __init__(self, config: ServiceConfig, engine: EngineAdapter) -> None:
        self.engine = engine
        log, path = WeightLog(config.weights.root), config.model.path
        self._folders = [log.folder(version) for version in VERSIONS]
        self._models: list[PreTrainedModel] = [
            reference_model(path, folder, fp8_activations=False, fp8_kv=False) for folder in self._folders
        ]

    async def start(self) -> None:
        """Serve version 0, without any keys and values."""
        await self.engine.pause("abort")
        await self.load(0, keep_cache=False)

    async def update(self, version: int) -> None:
        """Load a version while rollouts run, and keep the cache."""
        await self.engine.pause("keep", clear_cache=False)
        await self.load(version, keep_cache=True)

    async def load(self, version: int, keep_cache: bool) -> None:
        await self.engine.load(self._folders[version], version, keep_cache=keep_cache)
        await self.engine.resume()

    async def begin(self, name: str, sampling: Sampling = LONG) -> asyncio.Task[tuple[Completion, ...]]:
        """Begin completions of the prompt, which have sampled some tokens when this returns."""
        task = asyncio.create_task(self.engine.generate(name, PROMPT, sampling))
        await self.progress(name, n=sampling.n)
        return task

    async def progress(self, name: str, version: int | None = None, n: int = 1) -> None:
        """Wait until the ``n`` completions have a block of tokens; ``version``: sampled by that version."""

        def has_block(made: Completion) -> bool:
            last = made.spans[-1] if made.spans else None
            return last is not None and version in (None, last.version) and last.end - last.start >= BLOCK

        while sum(map(has_block, self.engine.tokens_since(name, [0] * n))) < n:
            await asyncio.sleep(0.01)

    def difference(
        self, prompt: Sequence[int], made: Completion, of: tuple[int, int], *wrote: tuple[int, int | None]
    ) -> float:
        """Return the mean |Δ| of the logprobs of some tokens.

        Args:
            prompt, made: a prompt and its completion.
            of: the first of these tokens, and the one after the last.
            wrote: versions, and the position up to which each wrote keys and values; None: the last position.
        """
        tokens, cache, logits, start = torch.tensor([[*prompt, *made.token_ids]]), DynamicCache(), [], 0
        with torch.no_grad():
            for version, end in wrote:
                logits.append(self._models[version](tokens[:, start:end], past_key_values=cache).logits[0])
                start = end or 0
        first, last = (len(prompt) + at for at in of)
        logprobs = torch.cat(logits)[first - 1 : last - 1].log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, first:last, None])[:, 0]
        return float((expected - torch.tensor(made.logprobs[of[0] : of[1]])).abs().mean())


def attentive_weights(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """Lively weights with which what attention reads decides more."""
    weights = lively_weights(model, seed)
    return {name: 3 * weight if name.endswith("o_proj.weight") else weight for name, weight in weights.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    settings = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": 1024}
    config = await committed(tmp_path_factory.mktemp("kept"), "none", "bfloat16", **settings)
    weights = config.weights.model_copy(update={"kv_cache_on_update": "keep", "kv_max_age": 1, "keep_versions": 9})
    config = config.model_copy(update={"weights": weights})
    await commit_weights(config, {seed: attentive_weights(config.model.path, seed) for seed in VERSIONS[1:]})
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with running_engine(config, monkeypatch) as engine:
            yield Kept(config, engine)


def spans_of(made: Completion) -> list[tuple[int, int | None]]:
    return [(span.version, span.kv_from) for span in made.spans]


async def test_updates_recompute_sequences_beyond_the_bound(kept):
    await kept.start()
    old = await kept.begin("old")
    await kept.update(1)
    new = await kept.begin("new")
    await kept.progress("old", 1)
    await kept.update(2)
    (of_old,), (of_new,) = await old, await new
    assert {made.finish_reason for made in (of_old, of_new)} == {"length"}
    assert spans_of(of_old) == [(0, None), (1, 0), (2, None)] and spans_of(of_new) == [(1, None), (2, 1)]

    first, second, third = ((span.start, span.end) for span in of_old.spans)
    written = len(PROMPT) + first[1] - 1  # the last token of version 0 was read by version 1
    assert kept.difference(PROMPT, of_old, first, (0, None)) < BF16_MEAN
    assert kept.difference(PROMPT, of_old, second, (0, written), (1, None)) < BF16_MEAN
    assert kept.difference(PROMPT, of_old, second, (1, None)) > OTHER
    assert kept.difference(PROMPT, of_old, third, (2, None)) < BF16_MEAN
    first, second = ((span.start, span.end) for span in of_new.spans)
    written = len(PROMPT) + first[1] - 1
    assert kept.difference(PROMPT, of_new, first, (1, None)) < BF16_MEAN  # not with the prompt's keys of version 0
    assert kept.difference(PROMPT, of_new, second, (1, written), (2, None)) < BF16_MEAN
    assert kept.difference(PROMPT, of_new, second, (2, None)) > OTHER


async def test_only_the_turns_of_a_session_share_older_entries(kept):
    await kept.start()
    [turn] = await kept.engine.generate("turn", PROMPT, SHORT, session_id="s")
    await kept.update(1)
    prompt = (*PROMPT, *turn.token_ids, 7, 8, 9)

    async def sample(name: str, **options: Any) -> tuple[list[tuple[int, int | None]], float, float]:
        [made] = await kept.engine.generate(name, prompt, SHORT, **options)
        every = 0, len(made.token_ids)
        mixed = kept.difference(prompt, made, every, (0, len(PROMPT)), (1, None))
        return spans_of(made), mixed, kept.difference(prompt, made, every, (1, None))

    spans, mixed, fresh = await sample("same", session_id="s")
    assert spans == [(1, 0)] and mixed < BF16_MEAN and fresh > OTHER
    spans, mixed, fresh = await sample("other", session_id="t")
    assert spans == [(1, None)] and mixed > OTHER and fresh < BF16_MEAN
    spans, mixed, fresh = await sample("salted", session_id="s", cache_salt="client's")
    assert spans == [(1, 0)] and mixed > OTHER and fresh < BF16_MEAN  # a bound: it found no entries
    spans, mixed, fresh = await sample("exact", session_id="s", exact_version=1)
    assert spans == [(1, None)] and mixed > OTHER and fresh < BF16_MEAN
    await kept.update(2)
    [made] = await kept.engine.generate("late", prompt, SHORT, session_id="s")  # the session is too old
    assert spans_of(made) == [(2, None)]
    assert kept.difference(prompt, made, (0, 8), (2, None)) < BF16_MEAN


async def test_request_sent_before_an_update_gets_the_new_salt(kept):
    await kept.start()
    await kept.engine.generate("first", PROMPT, SHORT)
    await kept.update(1)
    await kept.update(2)
    stream = kept.engine._stream("late", (*PROMPT, 7), vllm_sampling(SHORT), cache_salt="0")
    [output] = [output async for output in stream]
    made = completion(output.outputs[0])
    assert output.num_cached_tokens == 0
    assert kept.difference((*PROMPT, 7), made, (0, 8), (2, None)) < BF16_MEAN


async def test_version_may_drop_a_cache_that_its_pause_kept(kept):
    await kept.start()
    task = await kept.begin("long")
    await kept.engine.pause("keep", clear_cache=False)
    await kept.load(1, keep_cache=False)
    await kept.progress("long", 1)
    await kept.engine.pause("keep", clear_cache=False)
    await kept.engine.sleep()
    await kept.engine.wake_up()
    await kept.load(2, keep_cache=False)
    [made] = await task
    assert spans_of(made) == [(0, None), (1, None), (2, None)]
    for span in made.spans:
        assert kept.difference(PROMPT, made, (span.start, span.end), (span.version, None)) < BF16_MEAN


async def test_all_completions_of_a_request_begin_together(kept):
    await kept.start()
    preempted = kept.engine.scheduler.preemptions
    task = await kept.begin("two", LONG.model_copy(update={"n": 2}))
    await kept.update(1)
    await kept.progress("two", 1, n=2)
    await kept.update(2)
    completions = await task
    assert kept.engine.scheduler.preemptions == preempted  # none was for want of memory
    for made in completions:
        assert spans_of(made) == [(0, None), (1, 0), (2, None)]
        first, second, third = ((span.start, span.end) for span in made.spans)
        written = len(PROMPT) + first[1] - 1
        assert kept.difference(PROMPT, made, second, (0, written), (1, None)) < BF16_MEAN
        assert kept.difference(PROMPT, made, third, (2, None)) < BF16_MEAN


async def test_prompt_logprobs_are_of_one_version(kept):
    await kept.start()
    prompt = tuple(5 + 11 * at % 100 for at in range(14 * CHUNK))
    before = kept.engine.scheduler._at
    sampling = SHORT.model_copy(update={"prompt_logprobs": 0})
    task = asyncio.create_task(kept.engine.generate("scored", prompt, sampling))
    while kept.engine.scheduler._at == before:  # until the first step has computed some of the prompt
        await asyncio.sleep(0)
    await kept.update(1)
    [made] = await task
    assert [version for version, _ in spans_of(made)] == [1]  # the update was in time
    assert made.prompt_logprobs is not None
    found = [candidates[0].logprob for candidates in made.prompt_logprobs if candidates is not None]
    scored = made.model_copy(update={"token_ids": prompt[1:], "logprobs": tuple(found)})
    every = 0, len(prompt) - 1
    assert kept.difference(prompt[:1], scored, every, (1, None)) < BF16_MEAN
    assert kept.difference(prompt[:1], scored, (0, CHUNK - 1), (0, None)) > OTHER
