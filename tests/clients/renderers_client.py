"""The next renderers, which ask for packed logprobs, in a process of their own.

python -m tests.clients.renderers_client REPLIES URL MODEL
"""

import sys
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, create_renderer
from renderers.client import generate
from transformers import AutoTokenizer

from tests.clients.lines import answer


class Renderers:
    """One model of one server."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._client = model, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._renderer = create_renderer(AutoTokenizer.from_pretrained(model), DefaultRendererConfig())

    async def generate(self, messages: list[dict[str, str]], **sampling: Any) -> dict[str, Any]:
        made = await generate(
            client=self._client,
            renderer=self._renderer,
            messages=messages,  # type: ignore[arg-type]  # renderers' own TypedDict
            model=self._model,
            sampling_params=sampling,
        )
        arrays = {name: value.tolist() for name, value in made.items() if isinstance(value, np.ndarray)}
        return {**made, **arrays, "prompt_attribution": None}


def main(replies: str, url: str, model: str) -> None:
    answer(replies, {"renderers": Renderers(url, model)})


if __name__ == "__main__":
    main(*sys.argv[1:])
