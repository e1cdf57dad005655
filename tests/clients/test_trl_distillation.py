"""TRL 1.16.0's distillation with the service as teacher: its client, its worker and a step of its trainer."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollout_service.client import RolloutClient
from tests.clients.conftest import Start
from tests.clients.lines import ClientProcess
from tests.support.models import random_weights

pytestmark = [pytest.mark.client("TRL's distillation"), pytest.mark.timeout(1800)]  # importing TRL, twice

SEQUENCES, PROMPT_LENGTHS = [[8, 9, 10, 11, 12], [11, 12, 5]], [2, 1]
TOP_K = 4
TOLERANCE = 1e-4


@pytest.fixture
async def distillation(start: Start, service_url: str, model: Path, tmp_path: Path) -> ClientProcess:
    return await start("trl", "trl_distillation", service_url, model, tmp_path)


async def scored(client: RolloutClient, tokens: list[int], start: int) -> list[dict[int, float]]:
    """Logprobs by token id, of each token from ``start`` on."""
    scores = await client.score(tokens, start=start, top_logprobs=TOP_K)
    rows = zip(scores.offsets, scores.offsets[1:], strict=False)
    return [dict(zip(scores.token_ids[a:b].tolist(), scores.logprobs[a:b].tolist(), strict=True)) for a, b in rows]


async def test_the_teachers_client_has_the_services_scores(trl, service_url, client, push):
    await push()
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    made = await asyncio.to_thread(vllm.get_sequence_logprobs, SEQUENCES, PROMPT_LENGTHS, top_logprobs=TOP_K)
    assert [len(rows) for rows in made["logprobs"]] == [3, 2]
    for number, (tokens, start) in enumerate(zip(SEQUENCES, PROMPT_LENGTHS, strict=True)):
        for position, row in enumerate(await scored(client, tokens, start)):
            ids, logprobs = (made[name][number][position] for name in ("logprob_token_ids", "logprobs"))
            assert logprobs == sorted(logprobs, reverse=True) and len(ids) == TOP_K
            assert logprobs == pytest.approx([row[token] for token in ids], abs=TOLERANCE)
            [actual] = made["actual_logprobs"][number][position]
            assert actual == pytest.approx(row[tokens[start + position]], abs=TOLERANCE)


async def test_the_asynchronous_worker_has_the_services_scores(distillation, client, push):
    await push()
    sample = await distillation.call("distillation.scored", "12345>", TOP_K)
    start = sample["completion_mask"].index(1)
    rows = await scored(client, sample["input_ids"], start)
    assert len(rows) == sum(sample["completion_mask"]) > 0
    columns = zip(sample["teacher_topk_ids"], sample["teacher_topk_logprobs"], strict=True)
    for (ids, logprobs), row in zip(list(columns)[start:], rows, strict=True):
        found = {token: logprob for token, logprob in zip(ids, logprobs, strict=True) if token >= 0}
        assert found == pytest.approx(row, abs=TOLERANCE)


async def test_a_student_equal_to_its_teacher_has_no_loss(distillation, client, model):
    """But for the engine's FP8; a teacher with other weights gives one."""
    prompts, losses = ["12345>", "54321>"], []
    for weights in (load_file(model / "model.safetensors"), random_weights(model, seed=77)):
        await client.push_weights("next", weights)
        losses.append(await distillation.call("distillation.loss", prompts, TOP_K))
    same, other = losses
    assert 0 <= same < 0.05 and other > 10 * same
