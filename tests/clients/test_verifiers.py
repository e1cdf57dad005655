"""verifiers 0.4 and renderers 0.1.12, prime-rl's clients for training and for evaluation."""

from pathlib import Path

import pytest

from tests.clients.conftest import Start
from tests.clients.lines import ClientError, ClientProcess
from tests.clients.questions import HELLO
from tests.support.native_route import assert_as_native

pytestmark = pytest.mark.client("prime-rl with verifiers")

GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture
async def verifiers(start: Start, service_url: str, model: Path) -> ClientProcess:
    return await start("verifiers", "verifiers_client", service_url, model)


async def test_training_has_the_native_tokens(verifiers, client, push):
    for _ in range(2):
        version = await push()
        made = await verifiers.call(
            "train.get_response", HELLO, session_id="trace-1", cache_salt=str(version), **GREEDY
        )
        tokens = made["tokens"]
        await assert_as_native(
            client, tokens["prompt_ids"], tokens["completion_ids"], tokens["completion_logprobs"], version=version
        )
        assert made["finish_reason"] in ("stop", "length")
        assert made["usage"]["completion_tokens"] == len(tokens["completion_ids"])


async def test_evaluation_chats(verifiers, client, push):
    """The same text, by the service's chat template as by the renderer."""
    await push()
    chat = await verifiers.call("eval.get_response", HELLO, session_id="trace-2", **GREEDY)
    rendered = await verifiers.call("train.get_response", HELLO, **GREEDY)
    assert chat["message"]["content"] == rendered["message"]["content"]
    assert chat["usage"]["prompt_tokens"] == len(rendered["tokens"]["prompt_ids"])


async def test_an_overlong_prompt_is_told_from_other_errors(verifiers):
    """Before it is sent, by the card of the model; and by the words of the reply."""
    overlong = [{"role": "user", "content": "1" * 5000}]
    for name in ("train", "eval"):
        with pytest.raises(ClientError, match="maximum context length"):
            await verifiers.call(f"{name}.get_response", overlong, **GREEDY)
