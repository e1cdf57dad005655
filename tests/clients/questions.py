"""What several clients ask a random model for, and the native route's answer to it."""

from typing import Any

from rollout_service.client import RolloutClient

HELLO: list[Any] = [{"role": "user", "content": "1+1"}]
PROMPT = "user: 1+1\nassistant: "
"""The text that the chat template makes of ``HELLO``."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


async def native_text(client: RolloutClient, max_tokens: int = 8) -> str:
    """Return what the native route answers to ``PROMPT``, greedily."""
    [completion] = (await client.generate(PROMPT, temperature=0.0, max_tokens=max_tokens)).completions
    assert completion.text is not None
    return completion.text
