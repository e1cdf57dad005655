"""AReaL 1.0.4's remote engines over its vLLM and SGLang backends: rollouts, and the whole update by disk."""

import asyncio
from pathlib import Path

import pytest

from tests.clients.conftest import Start
from tests.clients.lines import ClientProcess
from tests.support.checkpoints import save_checkpoint
from tests.support.native_route import LOGPROB_TOLERANCE, assert_as_native
from tests.support.telltale import canary_weights, token_of

pytestmark = pytest.mark.client("AReaL")

LONG = 480
"""Tokens of a rollout across an update."""


@pytest.fixture(params=["vllm", "sglang"])
async def areal(request: pytest.FixtureRequest, start: Start, service_url: str, tmp_path: Path) -> ClientProcess:
    return await start("areal", "areal_client", request.param, service_url.removeprefix("http://"), tmp_path)


async def test_rollouts_have_the_native_tokens(areal, client, push):
    for _ in range(2):
        version = await push()
        await areal.call("engine.set_version", version)
        made = await areal.call("engine.agenerate", [8, 9, 10], greedy=True, max_new_tokens=8, ignore_eos=True)
        assert made["output_versions"] == [version] * 8 and made["stop_reason"] == "length"
        await assert_as_native(
            client, made["input_tokens"], made["output_tokens"], made["output_logprobs"], version=version
        )


async def test_a_teacher_scores_given_tokens(areal, client, push):
    await push()
    tokens = [8, 9, 10, 11, 12, 13]
    expected = (await client.score(tokens, start=3)).logprobs
    assert await areal.call("engine.compute_logp", tokens, 3) == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)


async def test_labels_are_right_across_an_update(areal, client, model, sources, next_version):
    """AReaL labels each piece of a rollout by its own count, so what its pause aborts must come back to it."""
    old, new = next_version, next_version + 1
    await client.push_weights(old, canary_weights(model, old))
    await areal.call("engine.set_version", old)
    folder = save_checkpoint(sources / f"weight_update_v{new}", canary_weights(model, new))
    rollout = asyncio.create_task(
        areal.call("engine.agenerate", [8, 9, 10], greedy=True, max_new_tokens=LONG, ignore_eos=True)
    )
    while sum(replica.running for replica in (await client.fleet()).replicas) < 1:
        await asyncio.sleep(0.05)
    await areal.call("engine.update", str(folder), new)
    made = await rollout
    before = made["output_tokens"].count(token_of(old))
    assert 0 < before < LONG
    assert made["output_tokens"] == [token_of(old)] * before + [token_of(new)] * (LONG - before)
    assert made["output_versions"] == [old] * before + [new] * (LONG - before)
    assert (await client.fleet()).latest_version == new and not folder.exists()  # AReaL deletes what was loaded
