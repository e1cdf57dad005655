"""Two ranks that sync as TRL does. ``python -m tests.unit.client.trl_two_ranks STORE URL`` is the second."""

import sys
from collections.abc import Iterator

import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from rollout_service.client.trl import RolloutServiceWeightTransfer
from rollout_service.errors import RolloutServiceError
from tests.unit.client.two_ranks import join

SYNCS = 6
RENAMED = 4
"""Index of the sync whose second tensor has another name."""


def streamed(sharded: dict[str, DTensor], sync: int) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``_streaming_iter`` of TRL 1.16.0's AsyncGRPOTrainer: every rank gathers each tensor in turn."""
    for name, tensor in sharded.items():
        renamed = sync == RENAMED and name == "layer1"
        yield "another" if renamed else name, tensor.full_tensor()


def sync_all(rank: int, store: str, url: str) -> list[str]:
    """How each sync ended on this rank."""
    sharded = join(rank, store)
    outcomes = []
    transfer = RolloutServiceWeightTransfer(url)
    for sync in range(SYNCS):
        if rank != 0:
            for _ in streamed(sharded, sync):
                pass
            outcomes.append("took part")
            continue
        try:
            transfer.send_weights(streamed(sharded, sync))
            assert transfer.status is not None
            outcomes.append(f"version {transfer.status.version}")
        except (RolloutServiceError, ValueError) as error:
            outcomes.append(getattr(error, "message", str(error)))
    transfer.destroy()
    torch.distributed.destroy_process_group()
    return outcomes


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(repr(sync_all(1, sys.argv[1], sys.argv[2])))
