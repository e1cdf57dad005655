"""AReaL's remote engine over one of its backends, in a process of its own.

python -m tests.clients.areal_client REPLIES BACKEND ADDRESS FOLDER
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names

from tests.clients.lines import answer

EXPERIMENT, TRIAL = "rollout-service", "test"
ENGINES = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}


class Areal:
    """The engine, whose arguments and replies are objects of AReaL's, with JSON on both sides."""

    def __init__(self, backend: str, address: str) -> None:
        config = InferenceEngineConfig(
            experiment_name=EXPERIMENT,
            trial_name=TRIAL,
            backend=f"{backend}:d1",
            max_concurrent_rollouts=8,
            setup_timeout=60,
        )
        self._engine = ENGINES[backend](config)
        self._engine.initialize(addr=address)

    async def agenerate(self, input_ids: list[int], **sampling: Any) -> dict[str, Any]:
        request = ModelRequest(input_ids=input_ids, gconfig=GenerationHyperparameters(**sampling))
        response = await self._engine.agenerate(request)
        wanted = ("input_tokens", "output_tokens", "output_logprobs", "output_versions", "stop_reason")
        return {name: getattr(response, name) for name in wanted}

    def compute_logp(self, input_ids: list[int], count: int) -> list[float]:
        """Score the last ``count`` tokens, as a teacher."""
        mask = [0] * (len(input_ids) - count) + [1] * count
        [scores] = self._engine.compute_logp(
            [{"input_ids": torch.tensor([input_ids]), "loss_mask": torch.tensor([mask])}]
        )
        return [float(score) for score in scores[0, -count:]]

    def update(self, path: str, version: int) -> None:
        """As the trainer does between two steps: a folder that it has written becomes its version."""
        self._engine.pause()
        self._engine.pause_generation()
        name_resolve.add(
            names.update_weights_from_disk(EXPERIMENT, TRIAL, self._engine.get_version()), str(time.time())
        )
        self._engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=path)).result()
        self._engine.set_version(version)
        self._engine.continue_generation()
        self._engine.resume()

    def set_version(self, version: int) -> None:
        self._engine.set_version(version)


def main(replies: str, backend: str, address: str, folder: str) -> None:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(Path(folder))))
    answer(replies, {"engine": Areal(backend, address)})


if __name__ == "__main__":
    main(*sys.argv[1:])
