"""Adapters, from the client over HTTP to a real ingest and its log."""

import asyncio
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import xxhash
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from rollout_service.client import RolloutClient, _adapters
from rollout_service.client._adapters import _write_here
from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    Forbidden,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    LogCorrupt,
    NotFound,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.ingest.adapters import MIN_UPLOADS, check_config
from rollout_service.protocol.adapters import (
    CONFIG_FILE,
    TENSORS_FILE,
    AdapterStatus,
    AdapterUpload,
    BeginAdapter,
    CommitAdapter,
)
from rollout_service.protocol.base import MAX_VERSION
from rollout_service.store import adapters as adapter_store
from rollout_service.store.adapters import AdapterStore
from tests.support.adapters import CONFIG, RANK, adapter_tensors, save_adapter
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.ingest.faults import fail, of
from tests.unit.ingest.trainer import changed, config_of, settle, started

ADAPTERS: dict[str, Any] = {"engine": {"adapters": {"max_live": 3, "max_rank": 8}}}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(model, tmp_path / "log", **ADAPTERS) as service:
        yield service


@pytest.fixture
async def client(service: RealIngest) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.url, retries=1) as client:
        yield client


async def push(client: RolloutClient, model: Path, seed: int = 1, name: str = "run-a", **how: Any) -> AdapterStatus:
    """Push an adapter of random numbers."""
    return await client.push_adapter(name, adapter_tensors(model, seed), config=CONFIG, wait="none", **how)


async def test_a_pushed_adapter_is_a_version_of_the_log(service, client, model, tmp_path):
    tensors = adapter_tensors(model, 1)
    folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 2))
    first = await client.push_adapter("run-a", tensors, config=CONFIG, label="step-1", base_version=0, wait="none")
    again = await client.push_adapter("run-a", tensors, config=CONFIG, wait="none")
    assert again == first and (first.name, first.version, first.rank, first.label) == ("run-a", 1, RANK, "step-1")
    second = await client.push_adapter("run-a", folder, version=7, wait="none")
    assert (second.version, second.base_version) == (7, 0) and second.digest != first.digest
    assert await client.adapters() == [first, second]
    AdapterStore(service.log.root).verify(second)
    with pytest.raises(VersionConflict, match="has version 7: push a newer one than that, and not 6"):
        await client.push_adapter("run-a", tensors, config=CONFIG, version=6, wait="none")
    begun = [
        (await push(client, model, seed, "run-b", version=version)).version for seed, version in ((1, 0), (2, "next"))
    ]
    assert begun == [0, 1]


async def test_tensors_of_every_dtype_and_layout_arrive_as_they_are(service, client, model):
    dtypes = torch.float16, torch.float32, torch.bfloat16
    tensors = {
        name: tensor.to(dtypes[number % 3]).t().contiguous().t()
        for number, (name, tensor) in enumerate(adapter_tensors(model, 1).items())
    }
    pushed = await client.push_adapter("run-a", tensors, config=CONFIG, wait="none")
    stored = load_file(AdapterStore(service.log.root).folder(pushed) / TENSORS_FILE)
    torch.testing.assert_close(stored, tensors, rtol=0, atol=0)  # dtypes, too


async def test_the_active_adapter_of_a_peft_model_is_pushed(service, client, model):
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, target_modules=["q_proj"]))
    peft.add_adapter("policy", LoraConfig(r=RANK, target_modules=["q_proj"]))
    for active, rank in ("default", 2), ("policy", RANK):
        peft.set_adapter(active)
        pushed = await client.push_adapter("run-a", peft, wait="none")
        stored = load_file(AdapterStore(service.log.root).folder(pushed) / TENSORS_FILE)
        expected = get_peft_model_state_dict(peft, adapter_name=active)
        assert pushed.rank == rank
        torch.testing.assert_close(stored, expected, rtol=0, atol=0)


async def test_equal_pushes_at_once_are_one_version(client, model, monkeypatch):
    begun, committed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def write_later(*_: object) -> bool:
        loop.call_soon_threadsafe(begun.set)
        return not committed.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(_adapters, "_write_here", write_later)
        second = asyncio.create_task(push(client, model))
        await begun.wait()
    first = await push(client, model)
    committed.set()
    assert await second == first


async def test_what_no_commit_takes_is_refused_before_anything_is_sent(service, client, model):
    for wrong in {"timeout_s": math.inf}, {"timeout_s": 0.0}, {"label": "no label"}, {"version": -1}:
        with pytest.raises(InvalidRequest):
            await client.push_adapter("run-a", adapter_tensors(model, 1), config=CONFIG, **wrong)
    assert not (service.log.root / "adapters.staging").exists()


async def test_a_restarted_ingest_has_the_committed_adapters(model, tmp_path):
    config = config_of(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
    folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 1))
    async with started(config) as ingest:
        pushed = await ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))
    async with started(config) as again:
        assert await again.adapters() == [pushed]


@pytest.mark.parametrize(
    ("max_live", "left"),
    [(4, ["run-a@1", "run-b@1", "run-b@2"]), (3, ["run-a@1", "run-b@2"]), (1, ["run-b@2"]), (0, [])],
)
async def test_a_restart_with_less_room_keeps_the_newest_adapters(model, tmp_path, max_live, left):
    def config(max_live: int) -> ServiceConfig:
        engine = {"adapters": {"max_live": max_live, "max_rank": 8}}
        return config_of(model, tmp_path / "log", engine=engine, weights={"source_roots": [tmp_path]})

    async with started(config(4)) as ingest:
        for seed, name in enumerate(("run-a", "run-b", "run-b")):
            folder = save_adapter(tmp_path / str(seed), adapter_tensors(model, seed))
            await ingest.commit_adapter(name, CommitAdapter(path=str(folder)))
    async with started(config(max_live)) as again:
        assert [str(adapter) for adapter in again.adapter_versions] == left


async def test_an_alias_with_the_name_of_an_adapter_is_refused(model, tmp_path):
    def config(**names: Any) -> ServiceConfig:
        config = config_of(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
        return config.model_copy(update={"model": config.model.model_copy(update=names)})

    folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 1))
    async with started(config()) as ingest:
        pushed = await ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))
    for names in {"aliases": ["run-a"]}, {"served_name": "run-a"}:
        with pytest.raises(InvalidRequest, match=r"adapter run-a@1 has a name of the served model.*DELETE"):
            async with started(config(**names)):
                pass
    async with started(config()) as again:
        assert await again.adapters() == [pushed]


async def test_the_upload_that_is_idle_for_the_longest_is_removed(service):
    def begin(number: int) -> BeginAdapter:
        return BeginAdapter(config=CONFIG, digest=f"{number:032x}", nbytes=100)

    ingest = service.ingest
    begun = [await ingest.begin_adapter("run-a", begin(number)) for number in range(MIN_UPLOADS)]
    await ingest.adapter_part("run-a", begun[0].digest, 0, bytes(100))
    await ingest.begin_adapter("run-a", begin(MIN_UPLOADS))
    with pytest.raises(NotFound, match="has no upload"):
        await ingest.adapter_part("run-a", begun[1].digest, 0, bytes(100))
    for upload in (begun[0], *begun[2:]):
        await ingest.adapter_part("run-a", upload.digest, 0, bytes(100))


async def test_each_live_adapter_has_room_for_an_upload(model, tmp_path):
    config = config_of(model, tmp_path / "log", engine={"adapters": {"max_live": 20, "max_rank": 8}})
    async with started(config) as ingest:
        begins = [BeginAdapter(config=CONFIG, digest=f"{number:032x}", nbytes=100) for number in range(20)]
        begun = [await ingest.begin_adapter(f"run-{number}", begin) for number, begin in enumerate(begins)]
        await ingest.adapter_part("run-0", begun[0].digest, 0, bytes(100))
        assert not (await ingest.begin_adapter("run-0", begins[0])).missing


async def test_what_others_have_beside_the_log_is_not_removed(model, tmp_path):
    config = config_of(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
    mine = save_adapter(tmp_path / "log" / "adapters" / "mine" / "step-1", adapter_tensors(model, 1))
    (tmp_path / "log" / "staging" / "notes").mkdir(parents=True)
    for seed in (1, 2):
        async with started(config) as ingest:
            folder = save_adapter(tmp_path / str(seed), adapter_tensors(model, seed))
            await ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))
    assert mine.is_dir() and (tmp_path / "log" / "staging" / "notes").is_dir()


async def test_no_version_follows_the_last_one(client, model):
    await push(client, model, 1, version=MAX_VERSION)
    with pytest.raises(VersionConflict, match="the last that there can be: DELETE /v1/adapters/run-a"):
        await push(client, model, 2)
    await client.remove_adapter("run-a")
    assert (await push(client, model, 2)).version == 1


async def test_older_versions_leave_a_place_free(service, client, model):
    for seed in range(1, 6):
        await push(client, model, seed)
    assert [str(each) for each in service.ingest.adapter_versions] == ["run-a@4", "run-a@5"]
    for name in ("run-b", "run-c"):
        await push(client, model, name=name)
    assert [str(each) for each in service.ingest.adapter_versions] == ["run-a@5", "run-b@1", "run-c@1"]
    assert len(list((service.log.root / "adapters").glob("*/*"))) == 3
    with pytest.raises(VersionConflict, match="remove one of run-a, run-b, run-c"):
        await push(client, model, name="run-d")
    await client.remove_adapter("run-b")
    await push(client, model, name="run-d")
    assert len(list((service.log.root / "adapters").glob("*/*"))) == 3


async def test_a_rollback_commits_the_files_of_an_older_version(service, client, model):
    first, _ = [await push(client, model, seed) for seed in (1, 2)]
    again = await client.rollback_adapter("run-a", 1, wait="none")
    assert (again.version, again.digest, again.nbytes, again.rank) == (3, first.digest, first.nbytes, first.rank)
    AdapterStore(service.log.root).verify(again)
    assert await client.rollback_adapter("run-a", 3, wait="none") == again
    assert [each.version for each in await client.adapters()] == [2, 3]


async def test_a_repeated_rollback_of_an_adapter_changes_nothing(service, client, model):
    for seed in (1, 2):
        await push(client, model, seed)
    again = await client.rollback_adapter("run-a", 1, wait="none")
    assert await client.rollback_adapter("run-a", 1, wait="none") == again
    await push(client, model, 3)
    with pytest.raises(NotFound, match=r"adapter run-a has no version 1 any more: give one of \[3, 4\]"):
        await client.rollback_adapter("run-a", 1, wait="none")


async def test_a_new_base_is_refused_while_adapters_live(client, model, weights):
    await client.push_weights(1, changed(weights, 1), wait="none")
    with pytest.raises(VersionConflict, match="belongs to weight version 0, and version 1 is served"):
        await push(client, model, base_version=0)
    await push(client, model)
    with pytest.raises(VersionConflict, match="the adapters run-a belong to the served weights"):
        await client.push_weights(2, changed(weights, 2), wait="none")
    with pytest.raises(VersionConflict, match="the adapters run-a belong to the served weights"):
        await client.rollback(0, wait="none")
    await client.remove_adapter("run-a")
    assert (await client.push_weights(2, changed(weights, 2), wait="none")).version == 2


async def test_a_configuration_that_is_not_served_is_named(client, model):
    tensors = adapter_tensors(model, 1)
    for changes, why in (
        ({"peft_type": "LOHA"}, "only LORA is served"),
        ({"use_dora": True}, "the adapter has DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules \(modules_to_save\)"),
        ({"bias": "all"}, "only none is served"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"r": 16}, "rank 16, and engine.adapters.max_rank is 8"),
        ({"rank_pattern": {"q_proj": 9}}, "rank 9, and engine.adapters.max_rank is 8"),
        ({"r": True}, "give positive numbers"),
        ({"lora_alpha": "4"}, r"alphas are \['4'\]"),
        ({"lora_alpha": True}, r"alphas are \[True\]"),
        ({"lora_alpha": 10**400}, "alphas are"),
        ({"alpha_pattern": {"q_proj": None}}, r"alphas are \[.*None\]"),
    ):
        with pytest.raises(InvalidManifest, match=why):
            await client.push_adapter("run-a", tensors, config=CONFIG | changes, wait="none")


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "1e999"])
def test_an_alpha_that_is_not_finite_is_refused(alpha):
    config = json.loads(json.dumps(CONFIG | {"lora_alpha": 0}).replace('"lora_alpha": 0', f'"lora_alpha": {alpha}'))
    with pytest.raises(InvalidManifest, match=r"alphas are \[(nan|inf)\]"):
        check_config(config, 8)


async def test_tensors_that_do_not_fit_the_model_are_named(service, client, model):
    for name, tensor, why in (
        (f"{Q}.lora_A.weight", torch.zeros(RANK, 64), "is the adapter of another base model"),
        (f"{Q}.lora_B.weight", torch.zeros(256, RANK + 1), "is the adapter of another base model"),
        (f"{Q}.lora_A.weight", None, "q_proj has lora_B alone"),
        (f"{Q}x.lora_A.weight", torch.zeros(RANK, 256), "q_projx, which is no linear layer here"),
        (f"{Q}.lora_magnitude_vector", torch.zeros(256), "is neither lora_A nor lora_B"),
        (f"{Q}.lora_A.weight", torch.full((RANK, 256), torch.nan), "values that are not finite"),
        (f"{Q}.lora_A.weight", torch.zeros(RANK, 256, dtype=torch.int8), "send float32, bfloat16 or float16"),
        (f"{Q}.lora_A.weight", torch.zeros(RANK, 256, dtype=torch.float64), "is float64, but weights are sent as"),
    ):
        given = adapter_tensors(model, 1) | {name: tensor}
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        with pytest.raises(InvalidManifest, match=why):
            await client.push_adapter("run-a", tensors, config=CONFIG, wait="none")
    assert service.ingest.adapter_versions == ()


async def test_an_upload_is_complete_before_it_is_committed(start, model, tmp_path):
    ingest = await start(model, tmp_path / "log", **ADAPTERS)
    upload = await ingest.begin_adapter("run-a", BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100))
    assert upload.missing == (0,)
    with pytest.raises(UploadIncomplete):
        await ingest.commit_adapter("run-a", CommitAdapter(digest=upload.digest))
    with pytest.raises(InvalidRequest, match="part 0 has 3 bytes, and must have 100"):
        await ingest.adapter_part("run-a", upload.digest, 0, b"abc")
    with pytest.raises(InvalidManifest, match="takes"):
        await ingest.begin_adapter("run-a", BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=1 << 40))
    folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 1))  # outside of the roots
    with pytest.raises(Forbidden):
        await ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))


async def test_a_refused_folder_leaves_no_copy(model, tmp_path):
    config = config_of(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
    staging = tmp_path / "log" / "adapters.staging"
    async with started(config) as ingest:
        for size, why, copied in ((2_000_000, "takes", False), (1, "is neither lora_A nor lora_B", True)):
            tensors = adapter_tensors(model, 1) | {"base_model.model.model.embed_tokens.weight": torch.zeros(size)}
            folder = save_adapter(tmp_path / "peft", tensors)
            with pytest.raises(InvalidManifest, match=why):
                await ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))
            assert staging.exists() is copied and list(staging.glob("*")) == []


@pytest.mark.parametrize(
    ("number", "error", "why"),
    [
        (errno.ENOSPC, InsufficientStorage, r"adapter run-a@1, which is not committed, needs \d+ bytes"),
        (errno.EIO, RolloutServiceError, r"adapter run-a was not committed: \[Errno 5\].*; push it again"),
        (errno.EROFS, RolloutServiceError, r"was not committed: \[Errno 30\].*; make that folder writable"),
    ],
)
async def test_an_adapter_that_a_disk_did_not_take_can_be_pushed_again(
    service, client, model, monkeypatch, number, error, why
):
    tensors = adapter_tensors(model, 1)
    with monkeypatch.context() as patch:
        fail(patch, adapter_store, "replace_synced", number)
        with pytest.raises(RolloutServiceError, match=why) as failed:
            await client.push_adapter("run-a", tensors, config=CONFIG, wait="none")
    assert type(failed.value) is error and service.ingest.adapter_versions == ()
    pushed = await client.push_adapter("run-a", tensors, config=CONFIG, wait="none")
    assert pushed.version == 1
    AdapterStore(service.log.root).verify(pushed)


@pytest.mark.parametrize(
    ("number", "error", "why"),
    [
        (errno.ENOSPC, InsufficientStorage, r"which is not removed, needs \d+ bytes"),
        (errno.EROFS, RolloutServiceError, r"run-a was not removed: \[Errno 30\].*; make that folder writable"),
    ],
)
async def test_a_removal_that_a_disk_did_not_take_is_refused(service, client, model, monkeypatch, number, error, why):
    pushed = await push(client, model)
    with monkeypatch.context() as patch:
        fail(patch, adapter_store, "replace_synced", number)
        with pytest.raises(RolloutServiceError, match=why) as failed:
            await client.remove_adapter("run-a")
    assert type(failed.value) is error and await client.adapters() == [pushed]
    await client.remove_adapter("run-a")
    assert await client.adapters() == []


@pytest.mark.parametrize(
    ("number", "error", "why"),
    [
        (errno.ENOSPC, InsufficientStorage, r"part 0 of adapter run-a needs 100 bytes"),
        (errno.EIO, RolloutServiceError, r"part 0 of adapter run-a was not stored: \[Errno 5\].*; send it again"),
    ],
)
async def test_a_part_that_a_disk_did_not_take_is_refused(start, model, tmp_path, monkeypatch, number, error, why):
    ingest = await start(model, tmp_path / "log", **ADAPTERS)
    upload = await ingest.begin_adapter("run-a", BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100))
    fail(monkeypatch, Path, "open", number)
    with pytest.raises(RolloutServiceError, match=why) as failed:
        await ingest.adapter_part("run-a", upload.digest, 0, bytes(100))
    assert type(failed.value) is error


async def test_an_upload_without_room_leaves_no_files(start, model, tmp_path, monkeypatch):
    ingest = await start(model, tmp_path / "log", **ADAPTERS)
    begin = BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100)
    with monkeypatch.context() as patch:
        fail(patch, os, "posix_fallocate", errno.ENOSPC)
        with pytest.raises(InsufficientStorage, match="adapter run-a needs 100 bytes"):
            await ingest.begin_adapter("run-a", begin)
    assert list((tmp_path / "log" / "adapters.staging").iterdir()) == []
    assert (await ingest.begin_adapter("run-a", begin)).missing == (0,)


async def test_adapters_of_a_replaced_log_stay(service, client, model):
    pushed = await push(client, model)
    origin = service.log.root / "ORIGIN"
    before = origin.read_bytes()
    origin.unlink()
    for call in (client.remove_adapter("run-a"), push(client, model, seed=2)):
        with pytest.raises(LogCorrupt, match="was replaced"):
            await call
    staged = list((service.log.root / "adapters.staging").glob("*"))
    assert AdapterStore(service.log.root).read() == service.ingest.adapter_versions and staged == []
    origin.write_bytes(before)
    assert await client.adapters() == [pushed]


async def test_an_upload_whose_folder_is_gone_is_begun_anew(start, model, tmp_path):
    begin = BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100, nonce="0" * 32)
    ingest = await start(model, tmp_path / "log", **ADAPTERS)
    upload = await ingest.begin_adapter("run-a", begin)
    await ingest.adapter_part("run-a", upload.digest, 0, bytes(100))
    assert (await ingest.begin_adapter("run-a", begin)).missing == ()
    assert upload.folder is not None
    shutil.rmtree(upload.folder)
    with pytest.raises(NotFound, match="adapter run-a has no upload"):
        await ingest.adapter_part("run-a", upload.digest, 0, bytes(100))
    assert await ingest.begin_adapter("run-a", begin) == upload
    staging = Path(upload.folder).parent
    shutil.rmtree(staging)
    staging.write_text("in the way")
    with pytest.raises(RolloutServiceError, match=r"adapter run-a cannot be uploaded: .*; push it again"):
        await ingest.begin_adapter("run-a", begin)
    staging.unlink()
    assert await ingest.begin_adapter("run-a", begin) == upload


async def test_an_upload_without_an_answer_of_the_disk_stops_no_other(start, model, tmp_path, monkeypatch):
    begin = BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100, nonce="0" * 32)
    folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 1))
    ingest = await start(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
    upload = await ingest.begin_adapter("run-a", begin)
    with monkeypatch.context() as disk:
        fail(disk, os, "stat", errno.ESTALE, of(upload.folder))
        pushed = await ingest.commit_adapter("run-b", CommitAdapter(path=str(folder)))
    assert (pushed.name, pushed.version) == ("run-b", 1)
    assert await ingest.begin_adapter("run-a", begin) == upload


@pytest.mark.parametrize("method", ["staging", "sweep"], ids=["begins an upload", "removes files"])
async def test_a_change_whose_caller_leaves_goes_on_alone(start, model, tmp_path, monkeypatch, method):
    ingest = await start(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path]})
    working, may_go, real = threading.Event(), threading.Event(), getattr(AdapterStore, method)

    def held(*arguments: Any) -> Any:
        working.set()
        assert may_go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(AdapterStore, method, held)
    if method == "staging":
        call = ingest.begin_adapter("run-a", BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=100))
    else:
        folder = save_adapter(tmp_path / "peft", adapter_tensors(model, 1))
        call = ingest.commit_adapter("run-a", CommitAdapter(path=str(folder)))
    leaving = asyncio.create_task(call)
    assert await asyncio.to_thread(working.wait, 60)
    leaving.cancel()
    await asyncio.wait([leaving])
    other = asyncio.create_task(ingest.discard(7))
    await settle()
    waits = not other.done()
    may_go.set()
    with pytest.raises(NotFound, match="version 7 is not staged"):
        await other
    assert waits


async def test_a_client_of_the_host_writes_the_file_and_others_send_parts(model, tmp_path):
    contents = {name: save(adapter_tensors(model, seed)) for seed, name in enumerate(("here", "elsewhere"), start=1)}
    async with (
        real_ingest(model, tmp_path / "log", **ADAPTERS) as service,
        httpx.AsyncClient(base_url=service.url, timeout=None) as http,
    ):
        for name, content in contents.items():
            begin = {"config": CONFIG, "digest": xxhash.xxh3_128_hexdigest(content), "nbytes": len(content)}
            nonce = {"nonce": "0" * 32} if name == "here" else {}
            upload = (await http.post(f"/v1/adapters/{name}", json=begin | nonce)).json()
            if nonce:
                assert (Path(upload["folder"]) / ("0" * 32)).exists()
                (Path(upload["folder"]) / TENSORS_FILE).write_bytes(content)
            else:
                assert upload["folder"] is None
                sent = await http.put(f"/v1/adapters/{name}/uploads/{upload['digest']}/parts/0", content=content)
                assert sent.status_code == 204, sent.text
            status = await http.post(f"/v1/adapters/{name}/commit", json={"digest": upload["digest"]})
            assert status.status_code == 200, status.text
            folder = AdapterStore(service.log.root).folder(service.ingest.adapter_versions[-1])
            assert {file.name for file in folder.iterdir()} == {CONFIG_FILE, TENSORS_FILE}
            assert (folder / TENSORS_FILE).read_bytes() == content


def test_a_client_writes_nowhere_but_beside_its_nonce(tmp_path):
    file = tmp_path / TENSORS_FILE
    file.write_bytes(b"not the service's")
    begin = BeginAdapter(config=CONFIG, digest="0" * 32, nbytes=9, nonce="1" * 32)
    assert not _write_here(AdapterUpload(digest="0" * 32, missing=(0,), folder=str(tmp_path)), begin, b"123456789")
    assert file.read_bytes() == b"not the service's"


async def test_vllms_routes_load_and_unload_folders(model, tmp_path):
    folder = save_adapter(tmp_path / "sources" / "step-1", adapter_tensors(model, 1))
    async with (
        real_ingest(model, tmp_path / "log", **ADAPTERS, weights={"source_roots": [tmp_path / "sources"]}) as service,
        httpx.AsyncClient(base_url=service.url, timeout=None) as http,
    ):
        body = {"lora_name": "run-a", "lora_path": str(folder)}
        for field in ({"timeout": 1}, {"lora_path": "x" * 5000}):
            assert (await http.post("/v1/load_lora_adapter", json=body | field)).status_code == 422
        outside = await http.post("/load_lora_adapter", json=body | {"lora_path": str(tmp_path)})
        assert outside.status_code == 403, outside.text
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):  # vLLM's and SGLang's
            refused = await http.post(path, json={"lora_name": "run-a"})
            assert refused.status_code == 404 and "there is no adapter 'run-a'" in refused.text


async def test_without_the_setting_adapters_are_refused(model, tmp_path):
    async with real_ingest(model, tmp_path / "log") as service, RolloutClient(service.url) as client:
        with pytest.raises(InvalidRequest, match=r"set engine\.adapters\.max_live"):
            await client.push_adapter("run-a", adapter_tensors(model, 1), config=CONFIG)
        with pytest.raises(NotFound, match=r"there is no adapter 'run-a'"):
            await client.remove_adapter("run-a")


def test_a_damaged_index_is_named(tmp_path):
    (tmp_path / "ADAPTERS").write_text(json.dumps({"versions": 1}))
    with pytest.raises(Exception, match="ADAPTERS does not parse"):
        AdapterStore(tmp_path).read()
