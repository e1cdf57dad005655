"""Pushes of what has changed, into the real ingest: each makes the version that a push of all would have made."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_service.client import RolloutClient, _sent_weights
from rollout_service.client._delta import DeltaPushes
from rollout_service.client._sent_weights import SentWeights
from rollout_service.client._tensors import describe
from rollout_service.errors import CommitTimeout, InsufficientStorage, QuantizationError, VersionConflict
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.shared_memory import TrainerMemory
from rollout_service.metrics import process, table
from rollout_service.protocol import delta_parts
from rollout_service.protocol.delta_parts import encode_header
from rollout_service.protocol.upload import CommitUpload, UploadTensor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.memory import Memory
from rollout_service.store.upload_record import UploadRecord, read_record
from tests.support.models import make_model
from tests.unit.client.conftest import Tensors, cancelled
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.ingest.trainer import folder_weights, scattered
from tests.unit.metrics.counts import Counts

EMBEDDING = "model.embed_tokens.weight"
stepped = partial(scattered, share=0.005)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each delta of a small model."""
    monkeypatch.setattr(delta_parts, "LEAST_TENSOR_BYTES", 10_000)


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(model, tmp_path / "log", weights={"keep_versions": 10}) as ingest:
        yield ingest


async def push(client: RolloutClient, version: object, tensors: object, **options: object) -> WeightStatus:
    options = {"transport": "delta", "wait": "none", **options}
    return await client.push_weights(version, tensors, **options)


def record_of(service: RealIngest, version: int) -> UploadRecord:
    """How a committed version came."""
    record = read_record(service.log.folder(version))
    assert record is not None
    return record


def base_of(service: RealIngest, version: int) -> int | None:
    """What a committed version came as a delta of; None: as a whole."""
    delta = record_of(service, version).begin.delta
    return None if delta is None else delta.base


async def require_the_same_as_whole(service: RealIngest, version: int, weights: Tensors) -> None:
    """A version is sound, and has the digest of the same weights when all of them are sent; pushes one more version."""
    async with RolloutClient(service.url) as other:
        whole = await push(other, "next", weights, transport="http")
    service.log.verify(service.log.manifest(version))
    assert service.log.manifest(version).digest == whole.digest
    assert service.log.manifest(version).delta_of is None


class TestSameVersion:
    @pytest.mark.parametrize(("family", "form"), [("qwen3_moe", "in memory"), ("deepseek_v3", "on disk")])
    async def test_a_delta_makes_the_version_that_all_bytes_would_make(self, tmp_path, family, form):
        from transformers import AutoModelForCausalLM

        folder = make_model(tmp_path / "model", family)
        weights = folder_weights(folder)
        if form == "in memory":  # experts are stacked in it
            weights = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())
        async with real_ingest(folder, tmp_path / "log") as service, RolloutClient(service.url) as client:
            await push(client, 1, weights)
            for version in (2, 3):
                weights = stepped(weights, version)
                status = await push(client, version, weights)
                assert base_of(service, version) == status.delta_of == version - 1
                assert status.uploaded_bytes == record_of(service, version).delta_bytes
                assert status.uploaded_bytes < 0.1 * status.total_bytes
            await require_the_same_as_whole(service, 3, weights)

    @pytest.mark.parametrize("quant", [{"weights": "none"}, {"weights": "int8_channel"}])
    async def test_whatever_the_service_makes_of_weights(self, model, tmp_path, weights, quant):
        async with real_ingest(model, tmp_path / "log", quant=quant) as service:
            async with RolloutClient(service.url) as client:
                await push(client, 1, weights)
                await push(client, 2, stepped(weights, 2))
            assert base_of(service, 2) == 1
            await require_the_same_as_whole(service, 2, stepped(weights, 2))

    @pytest.mark.parametrize("head", ["left out", "sent"])
    async def test_a_head_that_is_the_embedding(self, tied_model, tmp_path, head):
        weights = folder_weights(tied_model)
        async with real_ingest(tied_model, tmp_path / "log") as service, RolloutClient(service.url) as client:
            for version in (1, 2):
                new = stepped(weights, version)
                await push(client, version, new | ({"lm_head.weight": new[EMBEDDING]} if head == "sent" else {}))
            assert base_of(service, 2) == 1
            await require_the_same_as_whole(service, 2, new)

    async def test_float32_masters_and_generators_of_them(self, service, client, weights):
        masters = {name: tensor.float() for name, tensor in weights.items()}
        table = [UploadTensor(name=name, dtype="float32", shape=tuple(t.shape)) for name, t in masters.items()]
        for version in (1, 2):
            masters = {name: tensor * (1 + 1e-4 * version) for name, tensor in masters.items()}
            await push(client, version, ((n, t.clone()) for n, t in masters.items()), tensor_table=table)
        assert base_of(service, 2) == 1
        await require_the_same_as_whole(service, 2, masters)

    async def test_nothing_changed_sends_headers_alone(self, service, client, weights):
        told: list[tuple[int, int]] = []
        first = await push(client, "next", weights, label="run/1")
        second = await push(client, "next", weights, label="run/2", progress=lambda *each: told.append(each))
        assert (second.version, second.label, base_of(service, 2)) == (2, "run/2", 1)
        record = record_of(service, 2)
        headers = [encode_header(part.start, [None] * len(part)) for part in record.begin.delta_parts]
        assert second.uploaded_bytes == sum(map(len, headers)) and record.num_parts == len(headers) > 5
        assert told[-1] == (record.begin.nbytes, record.begin.nbytes)
        assert first.digest == second.digest
        service.log.verify(service.log.manifest(2))

    async def test_versions_are_counted_by_how_they_came(self, service, client, weights, monkeypatch):
        counts = Counts()
        monkeypatch.setattr(process, "sink", counts)
        await push(client, 1, weights)
        await push(client, 2, stepped(weights, 2))
        status = await push(client, 3, weights, transport="shared_memory")
        sent = {each: counts.total(table.RECEIVED_BYTES, each) for each in ("parts", "delta", "shared_memory")}
        stored = {each: counts.total(table.RECEIVED_VERSION_BYTES, each) for each in sent}
        assert stored == dict.fromkeys(sent, status.total_bytes)
        assert sent == {
            "parts": record_of(service, 1).begin.nbytes,
            "delta": record_of(service, 2).delta_bytes,
            "shared_memory": sum(tensor.nbytes for tensor in weights.values()),
        }
        assert [counts.total(table.VERSIONS_RECEIVED, each) for each in sent] == [1, 1, 1]


class TestFallsBack:
    """To sending all: once, with a line in the log; and the push after it is a delta again."""

    async def test_the_base_was_removed(self, service, client, weights, caplog):
        await push(client, 1, weights)
        async with RolloutClient(service.url) as other:
            await push(other, 2, stepped(weights, 9), transport="http")
        service.log.drop(1)
        await push(client, 3, stepped(weights, 3))
        assert base_of(service, 3) is None
        told = [record.message for record in caplog.records if record.name == "rollout_service.client"]
        assert len(told) == 1 and "delta of version 1" in told[0] and "version 1 is not in the log" in told[0]
        await push(client, 4, stepped(weights, 4))
        assert base_of(service, 4) == 3
        await require_the_same_as_whole(service, 4, stepped(weights, 4))

    async def test_another_log_has_another_version_of_that_number(self, service, client, weights, caplog):
        await push(client, 1, stepped(weights, 1))
        assert client._deltas is not None and client._deltas._sent is not None
        client._deltas._sent.version = 0  # of which it has other bytes
        await push(client, 2, stepped(stepped(weights, 2), 3))
        assert base_of(service, 2) is None and "its tensors hash to" in caplog.text

    async def test_damaged_memory_of_the_client(self, service, client, weights, caplog):
        await push(client, 1, weights)
        assert client._deltas is not None and client._deltas._sent is not None
        damaged = list(weights).index(EMBEDDING)
        next(client._deltas._sent._bytes_of(damaged))[1000] ^= 0x10
        await push(client, 2, stepped(weights, 2))
        assert base_of(service, 2) is None and f"the changes of {EMBEDDING} since version 1" in caplog.text
        await require_the_same_as_whole(service, 2, stepped(weights, 2))

    async def test_a_damaged_base_in_the_log(self, service, client, weights, caplog):
        await push(client, 1, weights)
        stored = next(tensor for tensor in service.log.manifest(1).tensors if tensor.name == EMBEDDING)
        with (service.log.folder(1) / stored.file).open("r+b") as file:
            file.seek(stored.offset + 5)
            file.write(b"\xaa\x55")
        await push(client, 2, stepped(weights, 2))
        assert base_of(service, 2) is None and f"{EMBEDDING} in {stored.file}" in caplog.text
        await require_the_same_as_whole(service, 2, stepped(weights, 2))

    @pytest.mark.parametrize("at_once", [1, 1 << 30], ids=["before all is compared", "when all is compared"])
    async def test_more_has_changed_than_is_worth_it(self, service, client, weights, caplog, monkeypatch, at_once):
        monkeypatch.setattr("rollout_service.client._compare.AT_ONCE_BYTES", at_once)
        monkeypatch.setattr("rollout_service.client._delta.CONVERTED_BYTES", at_once)
        caplog.set_level(logging.INFO, "rollout_service.client")
        await push(client, 1, weights)
        other = {name: tensor * 1.5 for name, tensor in weights.items()}
        await push(client, 2, other)
        assert base_of(service, 2) is None and "since version 1 more than 0.125 of all bytes" in caplog.text
        await push(client, 3, stepped(other, 3))
        assert base_of(service, 3) == 2
        await require_the_same_as_whole(service, 3, stepped(other, 3))

    async def test_a_part_would_be_larger_than_the_service_takes(self, service, client, weights, monkeypatch):
        await push(client, 1, weights)
        with monkeypatch.context() as patch:
            patch.setattr("rollout_service.client._compare.LARGEST_PART_BYTES", 1000)
            await push(client, 2, stepped(weights, 2))
        await push(client, 3, stepped(weights, 3))
        assert [base_of(service, version) for version in (2, 3)] == [None, 2]
        await require_the_same_as_whole(service, 3, stepped(weights, 3))

    async def test_a_part_is_refused(self, service, client, weights, monkeypatch, caplog):
        await push(client, 1, weights)
        with monkeypatch.context() as patch:
            # as long as the real one: of a part that is too long the service takes no byte
            patch.setattr(_sent_weights, "encode_header", lambda first, told: bytes(len(encode_header(first, told))))
            await push(client, 2, stepped(weights, 2))
        assert base_of(service, 2) is None and "its changes since version 1 cannot be read" in caplog.text
        await require_the_same_as_whole(service, 2, stepped(weights, 2))

    async def test_other_tensors_than_before(self, tied_model, tmp_path):
        weights = folder_weights(tied_model)
        async with real_ingest(tied_model, tmp_path / "log") as service, RolloutClient(service.url) as client:
            await push(client, 1, weights)
            await push(client, 2, {**weights, "lm_head.weight": weights[EMBEDDING]})
            assert base_of(service, 2) is None
            await push(client, 3, {**weights, "lm_head.weight": weights[EMBEDDING]})
            assert base_of(service, 3) == 2


class TestFailures:
    """A push that fails leaves the client with a base that is right, or with none."""

    async def test_two_clients_take_turns(self, service, client, weights):
        async with RolloutClient(service.url) as other:
            await push(client, 1, weights)
            await push(other, 2, stepped(weights, 2))
            await push(client, 3, stepped(weights, 3))
            await push(other, 4, stepped(weights, 4))
        assert [base_of(service, version) for version in (1, 2, 3, 4)] == [None, None, 1, 2]
        for version in (3, 4):
            await require_the_same_as_whole(service, version, stepped(weights, version))

    async def test_pushes_of_one_client_at_once_wait_for_each_other(self, service, client, weights):
        pushed = await asyncio.gather(*(push(client, "next", stepped(weights, seed)) for seed in range(3)))
        assert sorted(status.version for status in pushed) == [1, 2, 3]
        assert [base_of(service, version) for version in (1, 2, 3)] == [None, 1, 2]
        for seed, status in enumerate(pushed):
            await require_the_same_as_whole(service, status.version, stepped(weights, seed))

    async def test_a_push_whose_last_tensor_is_no_number_is_replaced(self, service, client, weights, monkeypatch):
        monkeypatch.setattr("rollout_service.client._compare.AT_ONCE_BYTES", 1)
        monkeypatch.setattr("rollout_service.client._delta.CONVERTED_BYTES", 1)
        await push(client, 1, weights)
        last, sent = list(weights)[-1], threading.Event()
        table = [describe(name, tensor) for name, tensor in weights.items()]

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in stepped(weights, 2).items():
                if name == last:
                    assert sent.wait(20)
                    tensor.view(-1)[3] = torch.nan
                yield name, tensor

        with pytest.raises(QuantizationError, match="is nan"):
            await push(client, 2, broken(), tensor_table=table, progress=lambda *_: sent.set())
        assert sent.is_set()
        await push(client, 2, stepped(weights, 3))
        assert base_of(service, 2) == 1
        await require_the_same_as_whole(service, 2, stepped(weights, 3))

    @pytest.mark.parametrize("kind", [str, float, np.int64, torch.tensor])
    async def test_a_version_may_be_any_number(self, service, client, weights, kind):
        await push(client, kind(1), weights)
        for _ in range(2):  # the second is the same push again
            await push(client, kind(2), stepped(weights, 2))
        assert base_of(service, 2) == 1

    async def test_a_push_whose_tensors_end_early_is_replaced(self, service, client, weights):
        await push(client, 1, weights)
        table = [describe(name, tensor) for name, tensor in weights.items()]
        with pytest.raises(ValueError, match="but the tensors ended"):
            await push(client, 2, iter(list(stepped(weights, 2).items())[:-1]), tensor_table=table)
        await push(client, 2, stepped(weights, 2))
        assert base_of(service, 2) == 1

    @pytest.mark.parametrize("label", ["run/2", None])
    async def test_a_failed_push_of_other_weights_as_the_next(self, service, client, weights, monkeypatch, label):
        await push(client, 1, weights)
        with failing_commits(monkeypatch):
            await push(client, "next", stepped(weights, 2), label=label)
        status = await push(client, "next", stepped(weights, 3), label=label)
        assert base_of(service, status.version) == 1 and (status.version == 2 or label is None)
        await require_the_same_as_whole(service, status.version, stepped(weights, 3))

    async def test_a_commit_that_failed_is_repeated_without_sending_anything(
        self, service, client, weights, monkeypatch
    ):
        await push(client, 1, weights)
        with failing_commits(monkeypatch):
            await push(client, 2, stepped(weights, 2))
        broken = stepped(weights, 2)
        broken["model.norm.weight"][3] = torch.nan
        with pytest.raises(QuantizationError, match="Version 2 stays staged with the parts that were sent"):
            await push(client, 2, broken)
        assert not (await client.weights(2)).missing_parts
        with monkeypatch.context() as nothing_sent:
            nothing_sent.delattr("rollout_service.client._part_sender._put")
            await push(client, 2, stepped(weights, 2))
        assert base_of(service, 2) == 1
        await require_the_same_as_whole(service, 2, stepped(weights, 2))

    async def test_a_commit_whose_replicas_are_late_is_the_next_base_and_may_be_repeated(
        self, service, client, weights, monkeypatch
    ):
        await push(client, 1, weights)
        commit = Ingest.commit

        async def late(ingest: Ingest, version: int, request: CommitUpload) -> WeightStatus:
            await commit(ingest, version, request)
            raise CommitTimeout("one replica is not live")

        with monkeypatch.context() as patch:
            patch.setattr(Ingest, "commit", late)
            with pytest.raises(CommitTimeout):
                await push(client, 2, stepped(weights, 2))
        assert (await push(client, 2, stepped(weights, 2))).digest == service.log.manifest(2).digest
        await push(client, 3, stepped(weights, 3))
        assert [base_of(service, version) for version in (2, 3)] == [1, 2]
        await require_the_same_as_whole(service, 3, stepped(weights, 3))

    @pytest.mark.parametrize("whole", [True, False], ids=["all", "changes"])
    async def test_a_push_that_is_cancelled(self, service, client, weights, monkeypatch, whole):
        if not whole:
            await push(client, 1, weights)
        begun = asyncio.Event()

        async def endless(*_: object) -> WeightStatus:
            begun.set()
            return await asyncio.Future()

        with monkeypatch.context() as patch:
            patch.setattr(Ingest, "commit", endless)
            pushing = asyncio.create_task(push(client, 2, stepped(weights, 2)))
            await begun.wait()
            await cancelled(pushing)
        await push(client, 3, stepped(weights, 3))
        assert base_of(service, 3) == (None if whole else 1)
        await require_the_same_as_whole(service, 3, stepped(weights, 3))

    async def test_changes_that_cannot_be_kept_make_the_next_push_a_whole_one(
        self, service, client, weights, monkeypatch, caplog
    ):
        await push(client, 1, weights)

        def fails(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as failing:
            failing.setattr(SentWeights, "_change", fails)
            await push(client, 2, stepped(weights, 2))
            await push(client, 3, stepped(weights, 3))
        await push(client, 4, stepped(weights, 4))
        assert [base_of(service, version) for version in (2, 3, 4)] == [1, None, 3]
        assert "the next push sends all, since what was sent last could not be kept: MemoryError()" in caplog.text
        await require_the_same_as_whole(service, 4, stepped(weights, 4))

    @pytest.mark.parametrize("then", ["pushed again", "next", "closed"])
    async def test_whoever_comes_next_waits_until_the_base_is_changed(
        self, service, client, weights, monkeypatch, then
    ):
        may_end, ended = await push_two_with_slow_base(client, weights, monkeypatch)
        if then == "closed":
            following: asyncio.Task[object] = asyncio.create_task(client.aclose())
        else:
            number = 2 if then == "pushed again" else 3
            following = asyncio.create_task(push(client, number, stepped(weights, number)))
        assert not ended.is_set()
        may_end.set()
        await following
        assert ended.is_set()
        assert then == "closed" or base_of(service, number) == number - 1

    async def test_a_push_that_is_cancelled_while_the_base_is_changed_leaves_it(
        self, service, client, weights, monkeypatch
    ):
        waits, wait_until_settled = asyncio.Event(), DeltaPushes.wait_until_settled

        async def watched(pushes: DeltaPushes) -> None:
            waits.set()
            await wait_until_settled(pushes)

        may_end, _ = await push_two_with_slow_base(client, weights, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaPushes, "wait_until_settled", watched)
            pushing = asyncio.create_task(push(client, 3, stepped(weights, 3)))
            await waits.wait()
            await cancelled(pushing)
        may_end.set()
        await push(client, 3, stepped(weights, 3))
        assert base_of(service, 3) == 2
        await require_the_same_as_whole(service, 3, stepped(weights, 3))

    async def test_the_same_push_again_changes_nothing(self, service, client, weights):
        for version in (1, 1, 2, 2):
            status = await push(client, version, stepped(weights, version))
            assert status.digest == service.log.manifest(version).digest
        assert [status.version for status in await client.weights()] == [0, 1, 2]
        with pytest.raises(VersionConflict, match="version 2 was pushed with other weights"):
            await push(client, 2, stepped(weights, 5))
        await push(client, 3, stepped(weights, 3))
        assert base_of(service, 3) == 2
        await require_the_same_as_whole(service, 3, stepped(weights, 3))
        with pytest.raises(VersionConflict, match="of version 1 was committed with other bytes"):
            await push(client, 1, stepped(weights, 5))

    async def test_the_same_push_to_a_service_that_has_lost_it_is_whole(self, service, client, weights):
        await push(client, 1, weights)
        await push(client, 2, stepped(weights, 2))
        deltas = client._deltas
        await deltas.wait_until_settled()
        deltas._sent.version, deltas._pushed = 3, deltas._pushed._replace(version=3, delta=None)
        await push(client, 3, stepped(weights, 3))
        assert base_of(service, 3) is None
        await require_the_same_as_whole(service, 3, stepped(weights, 3))


class TestAuto:
    """What ``transport="auto"`` does where the ingest does not reach the trainer's memory, as on another host."""

    @pytest.fixture(autouse=True)
    def apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def is_elsewhere(*_: object) -> None:
            raise OSError("the trainer runs on another machine")

        monkeypatch.setattr(TrainerMemory, "_open", is_elsewhere)
        monkeypatch.setattr("rollout_service.client._shared_memory.MIN_SHARED_BYTES", 1 << 10)
        monkeypatch.setattr("rollout_service.client._client.MIN_SHARED_BYTES", 1 << 10)

    async def test_who_quantizes_sends_deltas_from_the_third_push_on(self, service, client, weights):
        for version in (1, 2, 3, 4):
            await push(client, version, stepped(weights, version), transport="auto", quantize="trainer")
        assert [base_of(service, version) for version in (1, 2, 3, 4)] == [None, None, 2, 3]
        await require_the_same_as_whole(service, 4, stepped(weights, 4))

    async def test_nothing_is_kept_for_who_does_not_quantize_or_sends_little(
        self, service, client, weights, monkeypatch
    ):
        for version in (1, 2, 3):
            await push(client, version, stepped(weights, version), transport="auto")
        monkeypatch.setattr("rollout_service.client._client.MIN_SHARED_BYTES", 1 << 30)
        for version in (4, 5, 6):
            await push(client, version, stepped(weights, version), transport="auto", quantize="trainer")
        assert [base_of(service, version) for version in (3, 6)] == [None] * 2 and client._deltas is None

    async def test_it_gives_up_once_too_much_has_changed(self, service, client, weights):
        for version in (1, 2, 3, 4, 5):
            more = {name: tensor * (1.5 if version > 3 else 1) for name, tensor in stepped(weights, version).items()}
            await push(client, version, more, transport="auto", quantize="trainer")
        await push(client, 6, stepped(more, 6), transport="auto", quantize="trainer")
        assert [base_of(service, version) for version in range(1, 7)] == [None, None, 2, None, None, None]
        assert client._deltas is not None and client._deltas._sent is None
        await require_the_same_as_whole(service, 6, stepped(more, 6))

    async def test_it_keeps_only_what_the_host_has_room_for(self, service, client, weights, monkeypatch):
        has = Memory(total_bytes=0, used_bytes=0, kill_at=1.0)
        monkeypatch.setattr("rollout_service.client._delta.memory", lambda: has)
        for version in (1, 2, 3):
            await push(client, version, stepped(weights, version), transport="auto", quantize="trainer")
        assert base_of(service, 3) is None


@contextmanager
def failing_commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the ingest have no room for what the block commits."""

    async def fail(*_: object) -> WeightStatus:
        raise InsufficientStorage("no room")

    with monkeypatch.context() as patch, pytest.raises(InsufficientStorage):
        patch.setattr(Ingest, "commit", fail)
        yield


async def push_two_with_slow_base(
    client: RolloutClient, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Push versions 1 and 2. Return what lets the client keep version 2 as its base, and what says that it does."""
    may_end, ended = threading.Event(), threading.Event()
    become = SentWeights.become

    def late(*arguments: object) -> None:
        assert may_end.wait(60)
        become(*arguments)
        ended.set()

    await push(client, 1, weights)
    with monkeypatch.context() as patch:
        patch.setattr(SentWeights, "become", late)
        await push(client, 2, stepped(weights, 2))
    return may_end, ended
