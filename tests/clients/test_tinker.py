"""Tinker's SDK 0.38 samples from the service: ``create_sampling_client``, ``sample`` and ``compute_logprobs``."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from rollout_service.client import RolloutClient
from tests.clients.conftest import folder_of
from tests.clients.lines import ClientError, ClientProcess, client_process
from tests.support.adapters import CONFIG, adapter_tensors
from tests.support.own_service import own_service

pytestmark = [
    pytest.mark.client("Tinker's SDK"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPT = [8, 9, 10, 11, 12]
GREEDY = {"max_tokens": 8, "temperature": 0, "stop": []}


class Service(NamedTuple):
    """A service with an adapter, and two clients of it."""

    base: dict[str, str]
    """``create_sampling_client``'s argument for the model itself."""
    client: RolloutClient
    tinker: ClientProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    path, folder = [folder_of("tinker")], tmp_path_factory.mktemp("tinker")
    model: Path = folder / "tiny-qwen3"
    overrides = {
        "model": {"path": str(model), "aliases": ["org/tiny"]},
        "weights": {"root": str(folder / "weights")},
        "engine": {"adapters": {"max_live": 3, "max_rank": 8}},
    }
    async with (
        own_service(overrides) as (url, _),
        RolloutClient(url) as client,
        client_process("tests.clients.tinker_client", url, path=path) as tinker,
    ):
        await client.push_adapter("run-a", adapter_tensors(model, 1), config=CONFIG)
        yield Service({"base_model": "org/tiny"}, client, tinker)


async def test_samples_are_those_of_the_native_route(service):
    made = await service.tinker.call("tinker.sample", service.base, PROMPT, 1, params=GREEDY, topk_sample_logprobs=2)
    native = await service.client.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    [completion], [sequence] = native.completions, made["sequences"]
    assert sequence["tokens"] == list(completion.token_ids) and sequence["stop_reason"] == "length"
    assert sequence["logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)
    top = [[each[0] for each in row] for row in sequence["top"]]
    assert top == [[each.token_id for each in row] for row in completion.top_logprobs]
    assert made["prompt_logprobs"] is made["topk_prompt_logprobs"] is made["targets"] is None


async def test_samples_of_one_prompt_have_ids_of_their_own(service):
    params = {"max_tokens": 4, "temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50}
    made = await service.tinker.call("tinker.sample", service.base, PROMPT, 3, params=params)
    assert len({each["id"] for each in made["sequences"]}) == 3
    assert all(len(each["tokens"]) == len(each["logprobs"]) for each in made["sequences"])


async def test_prompt_logprobs_are_those_of_a_score(service):
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    made = await service.tinker.call("tinker.sample", service.base, PROMPT, 1, params=GREEDY, **options)
    scores = await service.client.score(PROMPT, top_logprobs=2)
    rows = [scores.logprobs[a:b].tolist() for a, b in zip(scores.offsets, scores.offsets[1:], strict=False)]
    assert made["prompt_logprobs"] == [None, *(pytest.approx(row[0], abs=1e-5) for row in rows)]
    assert made["topk_prompt_logprobs"][0] is None
    found = [[each[1] for each in row] for row in made["topk_prompt_logprobs"][1:]]
    assert found == [pytest.approx(row[1:], abs=1e-5) for row in rows]
    assert await service.tinker.call("tinker.compute_logprobs", service.base, PROMPT, 2) == [
        *[None] * 3,
        *made["prompt_logprobs"][3:],
    ]


async def test_model_paths_name_adapters(service):
    async def sample(path: str) -> list[int]:
        made = await service.tinker.call("tinker.sample", {"model_path": path}, PROMPT, 1, params=GREEDY)
        tokens: list[int] = made["sequences"][0]["tokens"]
        return tokens

    native = [
        list((await service.client.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True, adapter=name))
             .completions[0].token_ids)
        for name in ("run-a", None)
    ]  # fmt: skip
    assert await sample("tinker://run-a") == await sample("tinker://run-a@1") == native[0] != native[1]
    for path, why in (("tinker://other", "there is no adapter 'other'"), ("tinker://run/weights/1", "is no adapter")):
        with pytest.raises(ClientError, match=why):
            await sample(path)


async def test_errors_name_what_is_wrong(service):
    assert ["org/tiny", False] in await service.tinker.call("tinker.models")
    for model, prompt, options, why in (
        ({"base_model": "Qwen/Qwen3-8B"}, PROMPT, {}, "is not served here"),
        (service.base, [], {}, "the prompt is empty"),
        (service.base, PROMPT, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        (service.base, PROMPT, {"topk_sample_logprobs": 1000}, "at most"),
    ):
        with pytest.raises(ClientError, match=why):
            await service.tinker.call("tinker.sample", model, prompt, 1, params=GREEDY, **options)
    with pytest.raises(ClientError, match="training is not implemented here"):
        await service.tinker.call("tinker.train", "org/tiny")
