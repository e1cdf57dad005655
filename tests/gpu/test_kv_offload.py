"""A KV cache that overflows into host memory, while weights change: what is loaded, and which versions computed it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout_service.engine.load_statistics import SchedulerLog
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, running
from tests.support.reference import reference_logprobs, reference_model

BLOCK, BLOCKS = 32, 64
SESSIONS, UPDATES, LONGEST = 12, 50, 600
SETTINGS = {
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_offload_gib": 0.5,
    "linear_backend": "cutlass",
    "gpu_memory_utilization": 0.1,
    "extra": {"num_gpu_blocks_override": BLOCKS},
}
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)
CLOSE, FAR = 0.06, 0.2
"""Bounds of the mean |Δ| of logprobs from the fp32 reference: with its own keys and values, and with other weights'."""


class Loaded:
    """Counts the tokens that are loaded from host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        record = SchedulerLog.record

        def count(log: SchedulerLog, scheduler_stats: Any, *others: Any, **named: Any) -> None:
            offloaded = scheduler_stats and scheduler_stats.connector_prefix_cache_stats
            if offloaded:
                self.tokens += offloaded.hits + offloaded.preempted_hits
            record(log, scheduler_stats, *others, **named)

        monkeypatch.setattr(SchedulerLog, "record", count)


def prompt_of(seed: int, length: int = 200) -> tuple[int, ...]:
    """A prompt unlike those of other seeds from its first token on."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 128, (length,), generator=generator).tolist())


@asynccontextmanager
async def offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_age: int
) -> AsyncIterator[tuple[OneEngine, list[Path], list[PreTrainedModel]]]:
    """An engine that serves version 1, with the folders and references of versions 0 and 1. Later ones alternate."""
    weights = {"kv_cache_on_update": "keep", "kv_max_age": max_age, "keep_versions": 9}
    async with running("qwen3", tmp_path, monkeypatch, quant="none", weights=weights, **SETTINGS) as one:
        folders = []
        for version in (1, 2):
            tensors = random_weights(one.config.model.path, seed=version)
            for name in tensors:
                if name.endswith("o_proj.weight"):
                    tensors[name] *= 3  # what attention reads decides more
            folders.append(await one.commit(version, tensors))
        folders.reverse()  # by the version's remainder
        await one.load(folders[1], 1)
        path = one.config.model.path
        yield one, folders, [reference_model(path, each, fp8_activations=False, fp8_kv=False) for each in folders]


async def update(one: OneEngine, folders: Sequence[Path], version: int) -> None:
    """Load a version while requests wait, and keep the cache."""
    folder = folders[version % 2]
    await one.engine.stage(folder)
    await one.engine.pause("keep", clear_cache=False)
    await one.engine.load(folder, version, keep_cache=True)
    await one.engine.resume()


def differences(models: Sequence[PreTrainedModel], prompt: tuple[int, ...], made: Completion) -> torch.Tensor:
    """|Δ| of each token's logprob from that of its version alone."""
    found = []
    for span in made.spans:
        expected = reference_logprobs(models[span.version % 2], prompt, made.token_ids, 1.0)
        found.append((expected - torch.tensor(made.logprobs))[span.start : span.end].abs())
    return torch.cat(found)


@pytest.mark.parametrize("max_age", [0, 1])
async def test_sessions_overflow_into_host_memory_over_50_updates(max_age, tmp_path, monkeypatch):
    loaded = Loaded(monkeypatch)
    turns: list[tuple[tuple[int, ...], Completion]] = []
    async with offloading(tmp_path, monkeypatch, max_age) as (one, folders, models):
        ended, stopped = asyncio.Queue[None](), asyncio.Event()

        async def run_session(number: int) -> None:
            prompt, turn = prompt_of(number), 0
            while not stopped.is_set():
                [made] = await one.engine.generate(f"{number}-{turn}", prompt, SAMPLING, session_id=str(number))
                assert made.finish_reason == "length" and len(made.token_ids) == SAMPLING.max_tokens
                turns.append((prompt, made))
                ended.put_nowait(None)
                prompt, turn = (*prompt, *made.token_ids, *prompt_of(1000 * number + turn, 40)), turn + 1
                if len(prompt) > LONGEST:
                    prompt = prompt_of(number)

        async with asyncio.TaskGroup() as group:
            for number in range(SESSIONS):
                group.create_task(run_session(number))
            for version in range(2, UPDATES + 2):
                for _ in range(2 * SESSIONS):
                    await ended.get()
                await update(one, folders, version)
            stopped.set()
        ages = [span.version - span.kv_from for _, made in turns for span in made.spans if span.kv_from is not None]
        changed = [(prompt, made) for prompt, made in turns if len(made.spans) > 1]
        print(f"{len(turns)} turns, {len(changed)} of several versions, {loaded.tokens} tokens from the host")  # noqa: T201
        print(f"{len(ages)} spans with older keys and values")  # noqa: T201
        assert loaded.tokens > 1000 and changed
        assert max(ages, default=0) == max_age
        if max_age == 0:
            mean = float(torch.cat([differences(models, *each) for each in changed[-40:] + turns[-40:]]).mean())
            print(f"mean |Δ| {mean:.4f}")  # noqa: T201
            assert mean < CLOSE


async def test_only_sessions_load_blocks_of_an_older_version(tmp_path, monkeypatch):
    loaded = Loaded(monkeypatch)
    async with offloading(tmp_path, monkeypatch, max_age=1) as (one, folders, models):
        prompt, others = prompt_of(0), [prompt_of(seed) for seed in range(1, 2 * BLOCKS * BLOCK // 200)]

        async def sample(name: str, session: str | None) -> tuple[int, float]:
            """The number of tokens that are loaded for it, and the mean |Δ| from its version alone."""
            for number, other in enumerate(others):  # they need twice the GPU's blocks
                await one.engine.generate(f"{name}-{number}", other, SAMPLING)
            before = loaded.tokens
            [made] = await one.engine.generate(name, prompt, SAMPLING, session_id=session)
            found = loaded.tokens - before, float(differences(models, prompt, made).mean())
            print(f"{name}: {found[0]} tokens from the host, mean |Δ| {found[1]:.4f}")  # noqa: T201
            return found

        whole = (len(prompt) - 1) // BLOCK * BLOCK
        found, difference = await sample("first", "s")
        assert found == 0 and difference < CLOSE
        found, difference = await sample("second", "s")
        assert found == whole and difference < CLOSE
        await update(one, folders, 2)
        found, difference = await sample("older session", "s")
        assert found == whole and difference > FAR  # it reads what version 1 computed
        found, difference = await sample("fresh", None)
        assert found == 0 and difference < CLOSE
        await update(one, folders, 3)
        found, difference = await sample("too old session", "s")
        assert found == 0 and difference < CLOSE
