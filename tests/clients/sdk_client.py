"""Run OpenAI's and Anthropic's SDKs in a process of their own, in the versions that its path has.

python -m tests.clients.sdk_client REPLIES
"""

import sys
from operator import attrgetter
from typing import Any

import anthropic
import openai

from tests.clients.lines import answer

KEY = "EMPTY"


class Sdk:
    """The methods of an SDK by their names, with JSON on both sides."""

    def __init__(self, sdk: type) -> None:
        self._sdk = sdk

    async def create(self, base_url: str, method: str, **asked: Any) -> dict[str, Any]:
        """Return the reply of ``method``, such as ``chat.completions.create``."""
        async with self._sdk(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
            return dict((await attrgetter(method)(sdk)(**asked)).model_dump(mode="json", warnings=False))

    async def stream(self, base_url: str, method: str, **asked: Any) -> list[dict[str, Any]]:
        """Return all events of a streamed reply."""
        async with self._sdk(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
            events = await attrgetter(method)(sdk)(**asked, stream=True)
            return [event.model_dump(mode="json", warnings=False) async for event in events]


if __name__ == "__main__":
    answer(sys.argv[1], {"openai": Sdk(openai.AsyncOpenAI), "anthropic": Sdk(anthropic.AsyncAnthropic)})
