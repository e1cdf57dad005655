import asyncio
import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from rollout_service.client.trl import RolloutServiceWeightTransfer
from rollout_service.errors import EngineFailed, InvalidManifest, NotReady, Unauthorized
from rollout_service.protocol.upload import TrainerRecipe
from tests.unit.client.conftest import Tensors, stream_of
from tests.unit.client.service import Service
from tests.unit.client.trl_two_ranks import sync_all
from tests.unit.client.two_ranks import on_both_ranks, whole_tensors


@pytest.fixture
def healthy(threaded_service: Service) -> Service:
    threaded_service.json_at("GET", "/health", {"status": "ok"})
    return threaded_service


@pytest.fixture
def transfer(healthy: Service) -> Iterator[RolloutServiceWeightTransfer]:
    transfer = RolloutServiceWeightTransfer(healthy.url)
    yield transfer
    transfer.destroy()


def sync(transfer: RolloutServiceWeightTransfer, tensors: Tensors) -> None:
    """What TRL does at every sync."""
    transfer.pause()
    transfer.send_weights(iter(tensors.items()))
    transfer.resume()


def test_each_sync_is_one_version_more(healthy, transfer, tensors):
    transfer.init_weight_transfer()
    assert transfer.status is None
    for step in range(3):
        sync(transfer, {"w": torch.full((4,), float(step)), "v": torch.ones(3, dtype=torch.bfloat16)})
        assert transfer.status is not None and transfer.status.version == step + 1
    assert healthy.uploads[3].stream == stream_of({"w": torch.full((4,), 2.0), "v": torch.ones(3).bfloat16()})
    # a trainer that was started again
    again = RolloutServiceWeightTransfer(healthy.url, mode="wait", timeout_s=77)
    again.init_weight_transfer()
    sync(again, tensors)
    again.destroy()
    assert list(healthy.uploads) == [1, 2, 3, 4]
    commit = healthy.uploads[4].commit
    assert commit is not None and (commit.mode, commit.wait, commit.timeout_s) == ("wait", "all", 77)
    assert {path for _, path in healthy.log} & {"/pause", "/resume"} == set()


def test_after_a_failed_sync_the_next_one_has_a_new_version(healthy, transfer, tensors):
    """What was staged by the one that failed may be of other weights."""
    sync(transfer, tensors)
    healthy.answers["PUT", "/v1/weights/2/parts/3"].append(EngineFailed("out of disk"))
    with pytest.raises(EngineFailed, match="out of disk"):
        sync(transfer, tensors)
    sync(transfer, {name: tensor + 1 for name, tensor in tensors.items()})
    assert transfer.status is not None
    assert (transfer.status.version, transfer.status.state) == (3, "live")


def test_from_the_second_sync_on_tensors_are_not_held(transfer, tensors):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in tensors.items():
            copy = tensor.clone()
            alive.add(copy)
            gc.collect()
            most = max(most, len(alive))
            yield name, copy
            del copy

    transfer.send_weights(made())  # copies them
    alive.clear()
    most = 0
    transfer.send_weights(made())
    assert most == 1


def test_quantize_and_transport_are_those_of_its_pushes(healthy):
    healthy.recipe = TrainerRecipe(weights="fp8_block", quantized=("w",))
    transfer = RolloutServiceWeightTransfer(healthy.url, quantize="trainer", transport="delta")
    weights = {"w": torch.ones(128, 128), "norm": torch.ones(8)}
    for step in range(3):
        weights["w"][3, step] = 2.0
        sync(transfer, weights)
    transfer.destroy()
    uploads = [upload.begin for _, upload in sorted(healthy.uploads.items())]
    assert [begin.delta and begin.delta.base for begin in uploads] == [None, 1, 2]
    dtypes = {entry.name: entry.dtype for entry in uploads[0].tensors}
    assert dtypes == {"w": "float8_e4m3fn", "w_scale_inv": "float32", "norm": "bfloat16"}


def test_it_may_be_used_again_after_destroy(transfer, tensors):
    """TRL's ``train()`` destroys it at its end, and does not initialize it again when it is called again."""
    transfer.init_weight_transfer()
    sync(transfer, tensors)
    transfer.destroy()
    transfer.destroy()
    sync(transfer, tensors)
    assert transfer.status is not None
    assert transfer.status.version == 2


def test_it_waits_until_the_service_can_serve(healthy, transfer):
    healthy.answers["GET", "/health"].append(NotReady("no replica is live"))
    transfer.init_weight_transfer()
    assert healthy.calls("GET", "/health") == 2
    healthy.answers["GET", "/health"].append(NotReady("no replica is live"))
    impatient = RolloutServiceWeightTransfer(healthy.url, server_timeout_s=0)
    with pytest.raises(NotReady, match=f"{healthy.url} could not serve within 0 s"):
        impatient.init_weight_transfer()
    impatient.destroy()
    healthy.token = "right"
    with pytest.raises(Unauthorized):  # before training begins
        transfer.init_weight_transfer()


async def test_no_rank_hangs_when_a_sync_fails(healthy, tmp_path):
    """Before the upload begins, while it is under way, and where the tensors are others than the first time."""
    healthy.answers["POST", "/v1/weights"].append(InvalidManifest("no list"))
    healthy.answers["PUT", "/v1/weights/2/parts/1"].append(EngineFailed("out of disk"))
    module, sync_here = "tests.unit.client.trl_two_ranks", partial(asyncio.to_thread, sync_all)
    outcomes, others = await on_both_ranks(module, sync_here, tmp_path / "store", healthy.url)
    assert [outcome.partition(":")[0] for outcome in outcomes] == [
        "no list",
        "version 1",
        "out of disk",
        "version 3",
        "tensors and table differ",
        "version 5",  # 4 was announced
    ]
    assert others == repr(["took part"] * 6)
    assert healthy.uploads[3].stream == stream_of(whole_tensors())
