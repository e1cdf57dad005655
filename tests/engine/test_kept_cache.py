"""A KV cache that outlives updates: which keys and values do tokens read, by their logprobs?

The reference is a forward pass of several models: each writes the keys and values of some positions, and the next one
continues with them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, PreTrainedModel

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter, completion, vllm_sampling
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource
from rollout_service.store.log import WeightLog
from tests.engine.test_engine import BF16_MEAN, committed, lively_weights, running_engine
from tests.support.reference import reference_model

BLOCK = 32
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

    async def begin(self, name: str) -> asyncio.Task[tuple[Completion, ...]]:
        """Begin a long completion of the prompt, which has sampled some tokens when this returns."""
        task = asyncio.create_task(self.engine.generate(name, PROMPT, LONG))
        await self.progress(name, 0)
        return task

    async def progress(self, name: str, since: int) -> int:
        """Wait for more tokens than ``since``, and return their number."""
        while not (made := self.engine.tokens_since(name, [0])) or len(made[0].token_ids) < since + BLOCK:
            await asyncio.sleep(0.01)
        return len(made[0].token_ids)

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


async def commit_lively_versions(config: ServiceConfig) -> None:
    ingest = Ingest(config)
    await ingest.start()
    for version in VERSIONS[1:]:
        folder = config.model.path.parent / f"trainer-{version}"
        folder.mkdir()
        weights = lively_weights(config.model.path, seed=version)
        for name in weights:
            if name.endswith("o_proj.weight"):
                weights[name] *= 3  # what attention reads decides more
        save_file(weights, folder / "model.safetensors")
        await ingest.begin(BeginUpload(version=version, source=PathSource(path=folder)))
        await ingest.commit(version, CommitUpload())
    await ingest.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    config = await committed(tmp_path_factory.mktemp("kept"), "none", "bfloat16", block_size=BLOCK)
    weights = config.weights.model_copy(update={"kv_cache_on_update": "keep", "kv_max_age": 1, "keep_versions": 9})
    config = config.model_copy(update={"weights": weights})
    await commit_lively_versions(config)
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with running_engine(config, monkeypatch) as engine:
            yield Kept(config, engine)


def spans_of(made: Completion) -> list[tuple[int, int | None]]:
    return [(span.version, span.kv_from) for span in made.spans]


@pytest.mark.asyncio(loop_scope="module")
async def test_updates_recompute_sequences_beyond_the_bound(kept: Kept) -> None:
    await kept.start()
    old = await kept.begin("old")
    await kept.update(1)
    new = await kept.begin("new")
    await kept.progress("old", kept.engine.tokens_since("old", [0])[0].spans[-1].start)
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


@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_turns_of_a_session_share_older_entries(kept: Kept) -> None:
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


@pytest.mark.asyncio(loop_scope="module")
async def test_request_sent_before_an_update_gets_the_new_salt(kept: Kept) -> None:
    await kept.start()
    await kept.engine.generate("first", PROMPT, SHORT)
    await kept.update(1)
    await kept.update(2)
    stream = kept.engine._stream("late", (*PROMPT, 7), vllm_sampling(SHORT), cache_salt="0")
    [output] = [output async for output in stream]
    made = completion(output.outputs[0])
    assert output.num_cached_tokens == 0
    assert kept.difference((*PROMPT, 7), made, (0, 8), (2, None)) < BF16_MEAN


@pytest.mark.asyncio(loop_scope="module")
async def test_version_may_drop_a_cache_that_its_pause_kept(kept: Kept) -> None:
    await kept.start()
    task = await kept.begin("long")
    await kept.engine.pause("keep", clear_cache=False)
    await kept.load(1, keep_cache=False)
    await kept.progress("long", kept.engine.tokens_since("long", [0])[0].spans[-1].start)
    await kept.engine.pause("keep", clear_cache=False)
    await kept.engine.sleep()
    await kept.engine.wake_up()
    await kept.load(2, keep_cache=False)
    [made] = await task
    assert spans_of(made) == [(0, None), (1, None), (2, None)]
    for span in made.spans:
        assert kept.difference(PROMPT, made, (span.start, span.end), (span.version, None)) < BF16_MEAN
