"""verifiers' clients, with which prime-rl trains and evaluates, in a process of their own: they need openai below 3.

python -m tests.clients.verifiers_client REPLIES URL MODEL
"""

import sys
from typing import Any

from renderers import DefaultRendererConfig
from verifiers.v1.clients import EvalClient, TrainClient
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

from tests.clients.lines import answer


class Verifiers:
    """One of the clients, whose arguments and replies are objects of verifiers', with JSON on both sides."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model

    async def get_response(self, messages: list[Any], session_id: str | None = None, **sampling: Any) -> dict[str, Any]:
        body = {"model": self._model, "messages": messages, **sampling}
        config = SamplingConfig(**sampling)
        response = await self._client.get_response(ChatDialect(), body, config, session_id=session_id)
        return dict(response.model_dump(mode="json"))


def main(replies: str, url: str, model: str) -> None:
    train = TrainClientConfig(base_url=f"{url}/v1", renderer=DefaultRendererConfig(), renderer_model_name=model)
    clients = {"train": TrainClient(train), "eval": EvalClient(EvalClientConfig(base_url=f"{url}/v1"))}
    answer(replies, {name: Verifiers(client, model) for name, client in clients.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
