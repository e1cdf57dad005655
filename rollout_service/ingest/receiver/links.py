"""Links of one rank to a trainer's group, over NCCL or gloo.

Every released trainer uses NCCL, which needs a GPU other than the trainer's. gloo is for an ingest without a GPU, and
for trainers that declare it: the rank that serves the store sets BACKEND_KEY before anything else. A trainer that uses
NCCL sets no such key, and waits up to 300 s in its store until all ranks have come. An ingest without a GPU refuses it
without joining: after joining, the trainer would wait in NCCL, which has no timeout.
"""

import base64
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch documents its stores here
    BroadcastOptions,
    DistStoreError,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from rollout_service.protocol.weight_transfer import TransferBackend, TransferInit

BACKEND_KEY = "rollout_service/weight_transfer_backend"
GLOO_PREFIX = "rollout_service/weight_transfer"
"""Prefix of gloo's keys in the trainer's store."""
JOIN_TIMEOUT = timedelta(seconds=300)
"""The timeout of vLLM's own rendezvous. A trainer may load its model between the request and opening its store."""
BROADCAST_TIMEOUT = timedelta(seconds=300)
"""Timeout of one broadcast over gloo. Between two, a trainer may gather the next tensors from its other ranks."""
_SPEAKS_TIMEOUT = timedelta(seconds=10)
_ASK_TIMEOUT = timedelta(seconds=2)


class Link:
    """One rank of a group whose rank 0 is the trainer. Its methods block, and raise RuntimeError."""

    device: torch.device
    """Device on which ``broadcast`` needs its tensor."""
    _store: TCPStore | None = None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with the trainer's data; returns once it is filled."""
        raise NotImplementedError

    def leave(self) -> None:
        """Leave the group."""
        raise NotImplementedError

    def trainer_is_there(self) -> bool | None:
        """Return True if the trainer still serves the group's store; None if there is no store."""
        if self._store is None:
            return None
        self._store.set_timeout(_ASK_TIMEOUT)
        try:
            self._store.check([BACKEND_KEY])
        except RuntimeError:
            return False
        self._store.set_timeout(JOIN_TIMEOUT)
        return True


def join(init: TransferInit, backend: TransferBackend) -> Link:
    """Become a rank of the trainer's group. Raises RuntimeError or OSError."""
    return NcclLink(init) if backend == "nccl" else GlooLink(init)


class GlooLink(Link):
    """A link over TCP between host memories, in a group that is not torch's default one."""

    def __init__(self, init: TransferInit) -> None:
        if init.master_address is None or init.master_port is None:
            raise RuntimeError(
                "nccl_unique_id_b64 is NCCL's, and this ingest has no GPU: set weights.ingest_num_gpus, so that it is "
                "given one that the trainer does not use"
            )
        self.device = torch.device("cpu")
        # this connection does not count as one of the ranks that the store waits for
        self._store = TCPStore(
            init.master_address, init.master_port, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT
        )
        try:
            self._store.wait([BACKEND_KEY], _SPEAKS_TIMEOUT)
        except DistStoreError as error:
            raise RuntimeError(
                f"the trainer at {init.master_address}, port {init.master_port}, does not say in its store that it "
                "speaks gloo, so it speaks NCCL, and this ingest has no GPU: set weights.ingest_num_gpus, so that it "
                "is given one that the trainer does not use; nothing was joined"
            ) from error
        store = PrefixStore(GLOO_PREFIX, self._store)
        self._group = ProcessGroupGloo(store, init.rank_offset, init.world_size, BROADCAST_TIMEOUT)
        self._from_trainer = BroadcastOptions()
        self._from_trainer.rootRank, self._from_trainer.rootTensor = 0, 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See ``Link``. Also raises RuntimeError after BROADCAST_TIMEOUT."""
        data = tensor.view(-1).view(torch.uint8)
        self._group.broadcast([data], self._from_trainer).wait()  # type: ignore[attr-defined]  # its base class has it

    def leave(self) -> None:
        """See ``Link``."""
        del self._group, self._store


class NcclLink(Link):
    """vLLM's communicator on this process's first GPU."""

    def __init__(self, init: TransferInit) -> None:
        from rollout_service.compat.vllm_internals import join_nccl_by_id

        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        if init.nccl_unique_id_b64 is not None:
            unique_id = base64.b64decode(init.nccl_unique_id_b64)
        else:
            self._store, unique_id = ask_for_unique_id(init)
        self._group = join_nccl_by_id(unique_id, init.rank_offset, init.world_size, device=0)
        if self._group.disabled:
            raise RuntimeError("vLLM has found no NCCL library here, or VLLM_DISABLE_PYNCCL is set")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See ``Link``. NCCL has no timeout: the ingest kills this process if it waits too long."""
        stream = torch.cuda.current_stream()
        self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def leave(self) -> None:
        """See ``Link``."""
        self._group.destroy()


def ask_for_unique_id(init: TransferInit) -> tuple[TCPStore, bytes]:
    """Return the trainer's store and the NCCL unique id in it. Blocks until the trainer has set it.

    vLLM's own rendezvous would unpickle the store's content, and so run code from that address. Raises RuntimeError for
    anything but an id.
    """
    from rollout_service.compat.vllm_internals import NCCL_UNIQUE_ID_KEY, nccl_unique_id

    assert init.master_address is not None and init.master_port is not None  # TransferInit has checked it
    # the trainer waits until its store has counted every rank
    store = TCPStore(init.master_address, init.master_port, init.world_size, is_master=False, timeout=JOIN_TIMEOUT)
    try:
        return store, nccl_unique_id(store.get(NCCL_UNIQUE_ID_KEY))
    except ValueError as error:
        raise RuntimeError(
            f"the store at {init.master_address}, port {init.master_port}, has under {NCCL_UNIQUE_ID_KEY} {error}: "
            "rank 0 of the group must be vLLM's trainer engine; nothing was joined"
        ) from error
