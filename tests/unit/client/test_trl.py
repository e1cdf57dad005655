import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout_service.client.trl import RolloutServiceWeightTransfer
from rollout_service.errors import EngineFailed, InvalidManifest, NotReady, Unauthorized
from rollout_service.protocol.upload import TrainerRecipe
from tests.unit.client.conftest import Tensors, stream_of
from tests.unit.client.service import Service
from tests.unit.client.trl_two_ranks import sync_all, whole_tensors

ROOT = Path(__file__).parents[3]


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


def test_each_sync_is_one_version_more(healthy, transfer):
    transfer.init_weight_transfer()
    assert transfer.status is None
    for step in range(3):
        sync(transfer, {"w": torch.full((4,), float(step)), "v": torch.ones(3, dtype=torch.bfloat16)})
        assert transfer.status is not None
        assert transfer.status.version == step + 1
    assert list(healthy.uploads) == [1, 2, 3]
    assert healthy.uploads[3].stream == stream_of({"w": torch.full((4,), 2.0), "v": torch.ones(3).bfloat16()})


def test_a_sync_pauses_nothing_and_waits_for_replicas(healthy, tensors):
    transfer = RolloutServiceWeightTransfer(healthy.url, mode="wait", timeout_s=77)
    sync(transfer, tensors)
    transfer.destroy()
    commit = healthy.uploads[1].commit
    assert commit is not None
    assert (commit.mode, commit.wait, commit.timeout_s) == ("wait", "all", 77)
    assert {path for _, path in healthy.log} & {"/pause", "/resume"} == set()


def test_versions_go_on_after_the_newest_of_the_service(healthy, tensors):
    for run in (1, 2):  # the second is a trainer that was started again
        transfer = RolloutServiceWeightTransfer(healthy.url)
        transfer.init_weight_transfer()
        sync(transfer, tensors)
        sync(transfer, tensors)
        transfer.destroy()
        assert list(healthy.uploads) == list(range(1, 2 * run + 1))


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


def test_the_trainer_quantizes_if_it_is_told_to(healthy):
    healthy.recipe = TrainerRecipe(weights="fp8_block", quantized=("w",))
    transfer = RolloutServiceWeightTransfer(healthy.url, quantize="trainer")
    for _ in range(2):
        sync(transfer, {"w": torch.ones(128, 128), "norm": torch.ones(8)})
    transfer.destroy()
    for upload in healthy.uploads.values():
        dtypes = {entry.name: entry.dtype for entry in upload.begin.tensors}
        assert dtypes == {"w": "float8_e4m3fn", "w_scale_inv": "float32", "norm": "bfloat16"}


def test_what_changes_from_sync_to_sync_is_sent_if_it_is_told_to(healthy):
    transfer = RolloutServiceWeightTransfer(healthy.url, transport="delta")
    weights = {"w": torch.ones(128, 128), "norm": torch.ones(8)}
    for step in range(3):
        weights["w"][3, step] = 2.0
        sync(transfer, weights)
    transfer.destroy()
    deltas = [upload.begin.delta for _, upload in sorted(healthy.uploads.items())]
    assert deltas[0] is None and [delta and delta.base for delta in deltas[1:]] == [1, 2]


def test_it_may_be_used_again_after_destroy(transfer, tensors):
    """TRL's ``train()`` destroys it at its end, and does not initialize it again when it is called again."""
    transfer.init_weight_transfer()
    sync(transfer, tensors)
    transfer.destroy()
    transfer.destroy()
    sync(transfer, tensors)
    assert transfer.status is not None
    assert transfer.status.version == 2


def test_a_service_that_never_answers_is_said(healthy):
    healthy.answers["GET", "/health"].extend([NotReady("no replica is live")] * 100)
    transfer = RolloutServiceWeightTransfer(healthy.url, server_timeout_s=0)
    with pytest.raises(NotReady, match=f"{healthy.url} could not serve within 0 s"):
        transfer.init_weight_transfer()
    transfer.destroy()


def test_it_waits_until_the_service_can_serve(healthy, transfer):
    healthy.answers["GET", "/health"].append(NotReady("no replica is live"))
    transfer.init_weight_transfer()
    assert healthy.calls("GET", "/health") == 2


def test_a_wrong_token_is_said_before_training_begins(healthy):
    healthy.token = "right"
    transfer = RolloutServiceWeightTransfer(healthy.url, token="wrong")
    with pytest.raises(Unauthorized):
        transfer.init_weight_transfer()
    transfer.destroy()


async def test_no_rank_hangs_when_a_sync_fails(healthy, tmp_path):
    """Before the upload begins, while it is under way, and where the tensors are others than the first time."""
    healthy.answers["POST", "/v1/weights"].append(InvalidManifest("no list"))
    healthy.answers["PUT", "/v1/weights/2/parts/1"].append(EngineFailed("out of disk"))
    store = str(tmp_path / "store")
    second_rank = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.client.trl_two_ranks", store, healthy.url),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    outcomes = await asyncio.to_thread(sync_all, 0, store, healthy.url)
    output, _ = await second_rank.communicate()
    assert [outcome.partition(":")[0] for outcome in outcomes] == [
        "no list",
        "version 1",
        "out of disk",
        "version 3",
        "tensors and table differ",
        "version 5",  # 4 was announced
    ]
    assert output.decode() == repr(["took part"] * 6)
    assert healthy.uploads[3].stream == stream_of(whole_tensors())
