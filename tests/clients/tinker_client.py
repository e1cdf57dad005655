"""Run Tinker's SDK in a process of its own.

python -m tests.clients.tinker_client REPLIES URL
"""

import sys
from typing import Any

import torch
from tinker import RestClient, ServiceClient, types
from tinker.proto.response_conv import deserialize_sample_response

from tests.clients.lines import answer

KEY = "tml-none"
"""The SDK wants a key of this form; the service does not look at it."""


def plain(response: types.SampleResponse) -> dict[str, Any]:
    """Return a response's numbers."""
    targets = response.target_prompt_logprobs
    return {
        "sequences": [
            {
                "tokens": each.tokens,
                "logprobs": each.logprobs,
                "top": each.topk_logprobs,
                "stop_reason": each.stop_reason,
                "id": each.sequence_id,
            }
            for each in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "targets": None if targets is None else targets.to_torch().tolist(),
    }


class Tinker:
    """A session."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._service = ServiceClient(base_url=url, api_key=KEY)

    async def sample(self, model: dict[str, str], prompt: list[int], count: int, **options: Any) -> dict[str, Any]:
        """Create a sampling client, and sample. ``model``: arguments of ``create_sampling_client``."""
        client = await self._service.create_sampling_client(**model)
        if (ids := options.pop("targets", None)) is not None:
            options["target_prompt_logprobs"] = types.TensorData.from_torch(torch.tensor(ids))
        params = types.SamplingParams(**options.pop("params"))
        made = await client.sample(types.ModelInput.from_ints(prompt), count, params, **options)
        return plain(made)

    async def compute_logprobs(self, model: dict[str, str], prompt: list[int], last: int | None) -> list[float | None]:
        """Score a prompt."""
        client = await self._service.create_sampling_client(**model)
        return await client.compute_logprobs(types.ModelInput.from_ints(prompt), last)

    async def models(self) -> list[tuple[str | None, bool | None]]:
        """Return the models that the service names, and whether they can be trained."""
        found = await RestClient(base_url=self._url, api_key=KEY).get_server_capabilities()
        return [(each.model_name, each.trainable) for each in found.supported_models]

    async def train(self, model: str) -> None:
        """Begin to train."""
        await self._service.create_lora_training_client(base_model=model, rank=8)

    def read(self, message: str) -> dict[str, Any]:
        """Parse a protobuf message in hex."""
        return plain(deserialize_sample_response(bytes.fromhex(message)))


if __name__ == "__main__":
    _, replies, url = sys.argv
    answer(replies, {"tinker": Tinker(url)})
