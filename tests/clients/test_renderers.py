"""renderers 0.1.13.dev17, with which prime-rl asks for packed logprobs of the most likely tokens."""

from pathlib import Path

import pytest

from tests.clients.conftest import Start
from tests.clients.lines import ClientError, ClientProcess
from tests.clients.questions import HELLO
from tests.support.native_route import assert_as_native

pytestmark = pytest.mark.client("prime-rl's next renderers")

TOP_K = 4


@pytest.fixture
async def renderers(start: Start, service_url: str, model: Path) -> ClientProcess:
    return await start("renderers", "renderers_client", service_url, model)


async def test_packed_logprobs_are_the_native_ones(renderers, client, push):
    version = await push()
    made = await renderers.call("renderers.generate", HELLO, temperature=0.0, max_tokens=8, logprobs=TOP_K)
    prompt, tokens = made["prompt_ids"], made["completion_ids"]
    await assert_as_native(client, prompt, tokens, made["completion_logprobs"], version=version)
    tops = [*zip(made["completion_top_ids"], made["completion_top_logprobs"], strict=True)]
    for token, (ids, logprobs) in zip(tokens, tops, strict=True):
        assert token == ids[0] and len(ids) == len(logprobs)  # greedy
        assert logprobs == sorted(logprobs, reverse=True)
    # renderers leave out a last one that another token ties with
    assert max(len(ids) for ids, _ in tops) == TOP_K
    assert {span["version"] for span in made["weight_versions"]} == {str(version)}


async def test_more_than_the_engines_most_are_refused(renderers):
    """renderers ask for two more than they are told to."""
    with pytest.raises(ClientError, match="at most 20"):
        await renderers.call("renderers.generate", HELLO, max_tokens=8, logprobs=19)
