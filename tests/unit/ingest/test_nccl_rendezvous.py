"""The NCCL id in a trainer's store: read from vLLM's own rank 0, and never unpickled."""

import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from rollout_service.compat.vllm_internals import NCCL_UNIQUE_ID_KEY, nccl_unique_id
from rollout_service.ingest.receiver.links import ask_for_unique_id
from rollout_service.protocol.weight_transfer import TransferInit
from tests.support.gloo_trainer import free_port

UNIQUE_ID = os.urandom(NCCL_UNIQUE_ID_BYTES)
PROTOCOLS = range(3, pickle.HIGHEST_PROTOCOL + 1)


class RunsACommand:
    """Unpickling one makes the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def asked(serve: Callable[[int], object]) -> bytes:
    """The id that the receiver finds at a trainer whose rank 0 does ``serve(port)``."""
    port = free_port()
    served: list[object] = []
    trainer = threading.Thread(target=lambda: served.append(serve(port)))
    trainer.start()
    init = TransferInit(rank_offset=1, world_size=2, master_address="127.0.0.1", master_port=port)
    try:
        return ask_for_unique_id(init)[1]
    finally:
        trainer.join()


def serve_object(value: object) -> Callable[[int], object]:
    """Rank 0 whose store has ``value`` where vLLM's has the id."""

    def serve(port: int) -> TCPStore:
        store = TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=60), wait_for_workers=False)
        store.set(NCCL_UNIQUE_ID_KEY, pickle.dumps(value))
        return store

    return serve


def test_the_id_of_vllms_rank_0_is_read():
    def serve(port: int) -> StatelessProcessGroup:
        group = StatelessProcessGroup.create("127.0.0.1", port, rank=0, world_size=2)
        group.broadcast_obj(ncclUniqueId.from_buffer_copy(UNIQUE_ID), src=0)
        return group

    assert asked(serve) == UNIQUE_ID


def test_what_an_address_sends_is_not_unpickled(tmp_path):
    with pytest.raises(RuntimeError, match=rf"{NCCL_UNIQUE_ID_KEY} .* no pickled ncclUniqueId.*nothing was joined"):
        asked(serve_object(RunsACommand(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_id_is_read_in_every_pickle_protocol(protocol):
    assert nccl_unique_id(pickle.dumps(ncclUniqueId.from_buffer_copy(UNIQUE_ID), protocol)) == UNIQUE_ID


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_id_that_is_changed_anywhere_is_refused(protocol):
    """Every byte outside of the id itself counts, as do bytes before and after."""
    whole = pickle.dumps(ncclUniqueId.from_buffer_copy(UNIQUE_ID), protocol)
    start = whole.index(UNIQUE_ID)
    outside = [*range(start), *range(start + len(UNIQUE_ID), len(whole))]
    if protocol > 3:  # the number of a protocol says nothing about the object
        outside.remove(1)
    wrong = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in outside]
    for pickled in (*wrong, b"", whole[:-1], whole + b".", UNIQUE_ID, pickle.dumps(UNIQUE_ID, protocol)):
        with pytest.raises(ValueError, match="nothing was unpickled"):
            nccl_unique_id(pickled)
