import asyncio
import inspect
import shutil
import weakref
from collections.abc import Iterator

import pytest
import torch
import xxhash

from rollout_service.client import RolloutClient
from rollout_service.client._push import PushOptions
from rollout_service.client._tensors import describe
from rollout_service.errors import CommitTimeout, InvalidManifest, InvalidRequest, Overloaded, VersionConflict
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource, UploadTensor, upload_digest
from rollout_service.protocol.weights import WeightStatus
from tests.unit.client.conftest import Tensors, cancelled, stream_of
from tests.unit.client.real_ingest import real_ingest
from tests.unit.client.service import Crowd


@pytest.fixture
def tensors() -> Tensors:
    """11.4 parts of 1024 bytes: all dtypes, a view with strides, a scalar, nothing at all, one larger than a part."""
    torch.manual_seed(0)
    return {
        "embed": torch.randn(33, 64).bfloat16(),
        "norm": torch.randn(64),
        "transposed": torch.randn(32, 48).half().t(),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3.5),
        "every_second": torch.randn(64, 64).bfloat16()[:, ::2],
    }


def table_of(tensors: Tensors) -> list[UploadTensor]:
    return [describe(name, tensor) for name, tensor in tensors.items()]


class TestUpload:
    async def test_tensors_arrive_as_one_exact_stream(self, service, client, tensors):
        steps: list[tuple[int, int]] = []
        status = await client.push_weights(
            5, tensors, mode="abort", wait="none", timeout_s=7, progress=lambda *step: steps.append(step)
        )
        upload, total = service.uploads[5], len(stream_of(tensors))
        assert status == WeightStatus(version=5, state="live", total_bytes=total)
        assert upload.stream == stream_of(tensors) and list(upload.begin.tensors) == table_of(tensors)
        assert sorted(service.parts_sent()) == list(range(12))
        assert [sent for sent, _ in steps] == sorted({sent for sent, _ in steps})
        assert (len(steps), steps[-1]) == (12, (total, total))
        digest = upload_digest(xxhash.xxh3_128_hexdigest(data) for _, data in sorted(upload.parts.items()))
        assert upload.commit == CommitUpload(mode="abort", wait="none", timeout_s=7, upload_digest=digest)

    async def test_every_form_of_named_tensors_sends_the_same(self, service, client):
        module = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30))
        state = dict(module.state_dict())
        forms = [module, list(state.items()), module.named_parameters(), ((n, t) for n, t in state.items())]
        for version, form in enumerate(forms, start=1):
            await client.push_weights(version, form, tensor_table=table_of(state) if version == 4 else None)
            assert service.uploads[version].stream == stream_of(state)

    async def test_several_parts_travel_at_once_and_no_more_than_allowed(self, service, client, tensors):
        crowd = Crowd(3)

        async def count(part: int) -> None:
            async with crowd:
                pass

        service.before_part = count
        await client.push_weights(5, tensors, parallel_parts=3)
        assert crowd.most == 3

    async def test_a_generator_is_consumed_no_faster_than_parts_leave(self, service, client):
        """With every upload held up, the tensors made are those of the parts in flight and of one more."""
        parallel, made = 2, 0
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        table = [UploadTensor(name=f"t{i}", dtype="float32", shape=(256,)) for i in range(20)]  # a part each
        held, release = asyncio.Event(), asyncio.Event()

        def generator() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal made
            for entry in table:
                made += 1
                tensor = torch.full(entry.shape, float(made))
                alive.add(tensor)
                yield entry.name, tensor
                del tensor
                assert not alive, "a tensor was kept after its bytes were cut"

        async def hold(part: int) -> None:
            if part == parallel - 1:
                held.set()
            await release.wait()

        service.before_part = hold
        push = asyncio.create_task(client.push_weights(1, generator(), tensor_table=table, parallel_parts=parallel))
        both_held = asyncio.create_task(held.wait())
        await asyncio.wait([push, both_held], return_when=asyncio.FIRST_COMPLETED)
        assert not push.done(), push.exception()
        assert made <= parallel + 1
        release.set()
        await push
        assert made == 20


class TestFailure:
    async def test_a_part_that_was_refused_for_now_is_sent_again(self, service, client, tensors):
        service.answers["PUT", "/v1/weights/5/parts/3"] += [Overloaded("disk busy"), Overloaded("disk busy")]
        service.answers["POST", "/v1/weights"].append(Overloaded("busy"))
        service.answers["POST", "/v1/weights/5/commit"].append(Overloaded("busy"))
        await client.push_weights(5, tensors)
        assert service.parts_sent().count(3) == 3
        assert service.uploads[5].stream == stream_of(tensors)
        commit = service.uploads[5].commit
        assert commit is not None and (commit.mode, commit.wait, commit.timeout_s) == ("keep", "all", 600)

    async def test_a_refused_table_and_a_late_replica_are_errors_at_once(self, service, client, tensors):
        service.answers["POST", "/v1/weights"].append(InvalidManifest("unknown tensor embed", {"unknown": ["embed"]}))
        with pytest.raises(InvalidManifest, match="unknown tensor embed"):
            await client.push_weights(5, tensors)
        assert service.parts_sent() == []
        service.answers["POST", "/v1/weights/5/commit"].append(CommitTimeout("r2 is behind"))
        with pytest.raises(CommitTimeout, match="r2 is behind"):
            await client.push_weights(5, tensors)
        assert service.calls("POST", "/v1/weights/5/commit") == 1

    async def test_a_generator_that_fails_or_differs_from_its_table_commits_nothing(self, service, client, tensors):
        def generator() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(1)
            raise OSError("checkpoint is gone")

        with pytest.raises(OSError, match="checkpoint is gone"):
            await client.push_weights(5, generator())
        assert service.log == []
        others = iter({**tensors, "scalar": torch.zeros(2)}.items())
        with pytest.raises(ValueError, match="then came scalar"):
            await client.push_weights(5, others, tensor_table=table_of(tensors))
        assert service.calls("POST", "/v1/weights/5/commit") == 0

    async def test_cancelling_a_push_stops_its_uploads_and_commits_nothing(self, service, client, tensors):
        uploading, never = asyncio.Event(), asyncio.Event()

        async def hold(part: int) -> None:
            uploading.set()
            await never.wait()

        service.before_part = hold
        push = asyncio.create_task(client.push_weights(5, tensors, parallel_parts=1))
        await uploading.wait()
        await cancelled(push)
        never.set()
        assert service.parts_sent() == [0]
        assert service.calls("POST", "/v1/weights/5/commit") == 0


class TestOptions:
    async def test_a_rank_with_send_false_reads_all_but_sends_nothing(self, service, client, tensors):
        read: list[str] = []
        source = ((read.append(name), (name, tensor))[1] for name, tensor in tensors.items())
        assert await client.push_weights(5, source, tensor_table=table_of(tensors), send=False) is None
        assert read == list(tensors)
        assert service.log == []

    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            ({"parallel_parts": 0}, "parallel_parts"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"timeout_s": float("inf")}, "timeout_s"),
            ({"mode": "stop"}, "mode"),
            ({"quantize": "both"}, "quantize='both'"),
            ({"transport": "delta", "quantize": "service"}, "quantize='service' with transport='delta'"),
            ({"transport": "pigeon"}, "transport='pigeon': choose one of auto, http, shared_memory, cuda_ipc, delta"),
        ],
    )
    async def test_wrong_options_fail_before_anything_is_sent(self, service, client, tensors, wrong, complaint):
        with pytest.raises((ValueError, InvalidRequest), match=complaint):
            await client.push_weights(5, tensors, **wrong)
        assert service.log == []

    async def test_a_path_with_wrong_options_is_not_announced(self, service, client, tmp_path):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await client.push_path(6, tmp_path, timeout_s=0)
        assert service.log == []

    async def test_a_path_is_committed_without_parts(self, service, client, tmp_path):
        status = await client.push_path(6, tmp_path, wait="none", label="run/start")
        begin = service.uploads[6].begin
        assert begin.source is not None and begin.source.path == tmp_path and begin.label == "run/start"
        assert (status.version, service.parts_sent()) == (6, [])
        assert service.uploads[6].commit == CommitUpload(wait="none")

    async def test_a_path_that_another_push_has_replaced_is_not_committed(self, model, tmp_path, monkeypatch):
        for name in ("a", "b"):
            shutil.copytree(model, tmp_path / name)
        async with real_ingest(model, tmp_path / "log", weights={"source_roots": [tmp_path]}) as service:
            commit, other = service.ingest.commit, PathSource(path=tmp_path / "b")

            async def replaced(version: int, request: CommitUpload) -> WeightStatus:
                await service.ingest.begin(BeginUpload(version=version, source=other))
                return await commit(version, request)

            async with RolloutClient(service.url) as client:
                with monkeypatch.context() as meanwhile:
                    meanwhile.setattr(service.ingest, "commit", replaced)
                    with pytest.raises(VersionConflict, match=r"announced again since: .* nothing was committed"):
                        await client.push_path(1, tmp_path / "a", wait="none")
                assert service.log.versions() == [0]
                for _ in range(2):
                    assert (await client.push_path(1, tmp_path / "b", wait="none")).state == "committed"


def test_push_options_are_the_arguments_of_push_weights():
    parameters = inspect.signature(RolloutClient.push_weights).parameters
    assert [*parameters][:4] == ["self", "version", "named_tensors", "send"]
    assert [*parameters][4:] == [*PushOptions.__annotations__]
