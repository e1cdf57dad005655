"""Trainers and receivers that come and go: each test has an ingest and a group of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidRequest, NotFound, QuantizationError, WeightTransferFailed
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import BeginUpload, BroadcastSource
from rollout_service.protocol.weight_transfer import TransferInit
from tests.support.gloo_trainer import GlooTrainer, update_info
from tests.support.models import EMBEDDING, LM_HEAD
from tests.unit.ingest.broadcasting import (
    AS_BEFORE,
    another_trainer_pushes,
    join,
    push,
    receive_nothing,
    receiver_pid,
    send,
)
from tests.unit.ingest.trainer import config_of, folder_weights, started

pytestmark = pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")
PROJECT = Path(__file__).parents[3]
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    """Nobody serves: a commit waits for no replica."""
    return config_of(model, tmp_path / "log", scaling={"min_replicas": 0})


@pytest.fixture
async def joined(ingest: Ingest) -> GlooTrainer:
    """A trainer whose group the ingest's receiver has joined."""
    trainer = GlooTrainer()
    await join(ingest, trainer)
    return trainer


class TestOtherModels:
    async def test_a_tied_model_may_broadcast_no_output_head(self, tied_model, tmp_path):
        async with started(config_of(tied_model, tmp_path / "log", scaling={"min_replicas": 0})) as ingest:
            sent = folder_weights(tied_model)
            assert LM_HEAD not in sent
            await another_trainer_pushes(ingest, sent)
            digests = (await ingest.tensor_digests()).digests
            assert digests[LM_HEAD] == digests[EMBEDDING]

    async def test_stacked_experts_are_taken_apart(self, moe_model, tmp_path):
        async with started(config_of(moe_model, tmp_path / "log", scaling={"min_replicas": 0})) as ingest:
            model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.bfloat16)
            sent = {name: parameter.data for name, parameter in model.named_parameters()}
            assert any(name.endswith("experts.gate_up_proj") for name in sent)
            before = (await ingest.tensor_digests()).digests
            await another_trainer_pushes(ingest, sent)
            assert (await ingest.tensor_digests()).digests == before


class TestNoGroup:
    async def test_nothing_goes_without_a_group(self, ingest):
        for request in (
            ingest.transfer.start(),
            ingest.transfer.update(update_info({"a": torch.zeros(1)})),
            ingest.transfer.update(AS_BEFORE),  # as after a restart of the ingest
        ):
            with pytest.raises(WeightTransferFailed, match="POST /init_weight_transfer_engine first"):
                await request
        with pytest.raises(WeightTransferFailed, match="POST /start_weight_update first"):
            await ingest.transfer.finish(None)
        for announced in (
            {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1 << 40]]},
            {"names": ["a"], "dtype_names": ["quaternion"], "shapes": [[1]]},
            {"ipc_handles_pickled": "gASVAAA="},  # another backend
            [],  # no rank
            None,
        ):
            with pytest.raises(InvalidRequest, match="POST /update_weights"):
                await ingest.transfer.update(announced)
        with pytest.raises(InvalidRequest, match="begun by POST /start_weight_update: give a path or tensors"):
            await ingest.begin(BeginUpload(version=1, source=BroadcastSource(transfer="a")))
        trainer = GlooTrainer(speaks_gloo=False)
        with pytest.raises(WeightTransferFailed, match=r"set weights\.ingest_num_gpus.*nothing was joined"):
            await ingest.transfer.init(TransferInit.model_validate(trainer.init_info))
        assert ingest.transfer.status().state == "no group"
        await ingest.transfer.shutdown()
        assert ingest.transfer.status().state == "no group"

    @pytest.mark.parametrize(
        ("announced", "why"),
        [
            ({"names": ["a"]}, "POST /update_weights: update_info"),
            (AS_BEFORE, r"names is empty.*this group has had none.*POST /init_weight"),
        ],
        ids=["no dtypes", "an empty table in a first round"],
    )
    async def test_what_cannot_be_received_ends_the_group(self, ingest, joined, announced, why):
        await ingest.transfer.start()
        with pytest.raises(InvalidRequest, match=why):
            await ingest.transfer.update(announced)
        with pytest.raises(RuntimeError):  # a trainer that broadcasts all the same is told at once
            await asyncio.to_thread(joined.broadcast_bytes, torch.zeros(1 << 24, dtype=torch.uint8))
        with pytest.raises(WeightTransferFailed, match="POST /init_weight_transfer_engine first"):
            await ingest.transfer.start()

    async def test_a_table_ends_with_its_group(self, ingest, joined, weights):
        assert (await push(ingest, joined, weights)).version == 1
        trainer = GlooTrainer()
        await join(ingest, trainer)
        await ingest.transfer.start()
        with pytest.raises(InvalidRequest, match="names is empty"):
            await ingest.transfer.update(AS_BEFORE)
        with pytest.raises(WeightTransferFailed, match="POST /init_weight_transfer_engine first"):
            await ingest.transfer.update(AS_BEFORE)

    async def test_a_first_round_that_failed_can_be_repeated(self, ingest, joined, weights):
        broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
        with pytest.raises(QuantizationError):
            await push(ingest, joined, broken)
        assert (await push(ingest, joined, weights, announced=AS_BEFORE)).version == 1

    async def test_an_init_may_come_again_and_a_request_too_many_is_refused(self, ingest, joined, weights):
        pid = receiver_pid()
        await ingest.transfer.init(TransferInit.model_validate(joined.init_info))
        assert receiver_pid() == pid
        await push(ingest, joined, weights)
        await ingest.transfer.start()
        await send(ingest, joined, weights)
        with pytest.raises(InvalidRequest, match=r"request 2 of this round.*that round had 1"):
            await ingest.transfer.update(AS_BEFORE)


class TestGoingAway:
    @pytest.mark.parametrize("is_receiving", [True, False])
    async def test_a_receiver_that_is_killed_fails_the_update_by_name(self, ingest, joined, weights, is_receiving):
        await ingest.transfer.start()
        receiving = await receive_nothing(ingest, weights) if is_receiving else None
        os.kill(pid := receiver_pid(), signal.SIGKILL)
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.01)
        receiving = receiving or asyncio.create_task(ingest.transfer.update(update_info(weights)))
        with pytest.raises(WeightTransferFailed, match=f"the receiver process {pid} .*ended"):
            await receiving
        with pytest.raises(WeightTransferFailed, match=f"the receiver process {pid} .*ended"):
            await ingest.transfer.finish(None)
        status = ingest.transfer.status()
        assert status.state == "no group" and str(pid) in str(status.error)
        await ingest.transfer.shutdown()
        assert [status.version for status in await ingest.versions()] == [0]

    async def test_a_trainer_that_vanishes_fails_the_update_by_name(self, ingest, joined, weights):
        await ingest.transfer.start()
        receiving = await receive_nothing(ingest, weights)
        joined.close()
        with pytest.raises(WeightTransferFailed, match="POST /init_weight_transfer_engine"):
            await receiving
        await another_trainer_pushes(ingest, weights)

    async def test_a_silent_trainer_is_given_up(self, ingest, joined, weights, monkeypatch):
        monkeypatch.setattr("rollout_service.ingest.receiver.receiver.SILENCE_TIMEOUT_S", 0.2)
        await ingest.transfer.start()
        with pytest.raises(WeightTransferFailed, match=r"nothing was broadcast for 0\.2 s"):
            await ingest.transfer.update(update_info(weights))
        assert ingest.transfer.status().state == "no group"

    async def test_a_trainer_started_anew_takes_the_place_of_the_old_one(self, ingest, joined, weights):
        await ingest.transfer.start()
        await send(ingest, joined, {UP_PROJ: weights[UP_PROJ]})
        pid = receiver_pid()
        await another_trainer_pushes(ingest, weights)
        assert not psutil.pid_exists(pid)
        assert [status.version for status in await ingest.versions()] == [0, 1]

    async def test_the_same_address_after_a_restart_is_no_repeat(self, ingest, joined, weights):
        port = joined.port
        joined.close()
        again = await asyncio.to_thread(GlooTrainer, port)
        await join(ingest, again)
        assert (await push(ingest, again, weights)).version == 1
        again.close()

    async def test_shutdown_leaves_the_group(self, ingest, joined):
        await ingest.transfer.start()
        pid = receiver_pid()
        await ingest.transfer.shutdown()
        await ingest.transfer.shutdown()
        assert not psutil.pid_exists(pid)
        assert [status.version for status in await ingest.versions()] == [0]

    async def test_the_receiver_ends_with_the_ingest(self, ingest, joined, weights):
        await ingest.transfer.start()
        receiving = await receive_nothing(ingest, weights)
        pid = receiver_pid()
        await ingest.stop()
        assert not psutil.pid_exists(pid)
        with pytest.raises(WeightTransferFailed, match="the ingest ends"):
            await receiving

    def test_the_receiver_ends_with_an_ingest_that_is_killed(self):
        code = """
import asyncio
from rollout_service.ingest.receiver.receiver import Receiver

async def start():
    print(Receiver().pid, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(start())
"""
        parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        receiver = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        parent.stdout.close()
        gone, _ = psutil.wait_procs([receiver], timeout=120)
        assert gone == [receiver]

    async def test_a_broadcast_is_not_taken_up_after_a_restart(self, ingest, restarted, joined, weights):
        await ingest.transfer.start()
        await send(ingest, joined, weights)
        successor = await restarted()
        with pytest.raises(NotFound, match="what a trainer broadcasts cannot be read again"):
            await successor.status(1)
        await another_trainer_pushes(successor, weights)
