"""A trainer in a process of its own: vLLM's trainer engine and HTTP client, with gloo in place of NCCL.

    python -m benchmarks.faults.broadcasting_trainer URL MODEL VERSION WHOLE|HALF

HALF: it says so when it has handed over half of the version's bytes, and stands still until its input ends; then it
goes on with the rest.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from benchmarks.faults.broadcasts import HALF_WAY
from tests.support.gloo_trainer import Tensors, trainer_info, use_gloo
from tests.support.telltale import canary_weights


class NamingClient(HTTPVLLMWeightSyncClient):
    """vLLM's trainer engine names no version; this client does."""

    def __init__(self, base_url: str, version: int) -> None:
        super().__init__(base_url)
        self._version = version

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Under the number that was given."""
        super().finish_weight_update(weight_version or str(self._version))


class StopsHalfWay(Tensors):
    """Weights of which the second half does not come before this process's input has ended."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        total, handed_over, stopped = sum(tensor.nbytes for tensor in self.weights.values()), 0, False
        for name, tensor in self.weights.items():
            if not stopped and 2 * handed_over >= total:
                print(HALF_WAY, handed_over, total, flush=True)
                sys.stdin.read()
                stopped = True
            yield name, tensor
            handed_over += tensor.nbytes


def main(url: str, model: Path, version: int, source: Tensors) -> None:
    """Push one version. Raises what vLLM's trainer engine raises."""
    source.weights = canary_weights(model, version)
    with pytest.MonkeyPatch.context() as patch:
        use_gloo(patch)
        client = NamingClient(url, version)
        engine = WeightTransferTrainerFactory.trainer_init(trainer_info(), client=client, source=source)
        engine.send_weights()
        client.shutdown_weight_transfer_engine()
        engine.shutdown()


if __name__ == "__main__":
    _, given_url, given_model, given_version, given_part = sys.argv
    main(given_url, Path(given_model), int(given_version), StopsHalfWay() if given_part == "HALF" else Tensors())
