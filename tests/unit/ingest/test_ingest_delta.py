"""Changes of a version in the log, as the ingest takes them: sound, unsound, interrupted, and without their base."""

import asyncio
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from pydantic import ValidationError

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    DeltaBaseGone,
    InvalidDelta,
    InvalidManifest,
    NotFound,
    QuantizationError,
)
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.delta import Change, DeltaOfVersion
from rollout_service.model.convert import Converter, tensor_bytes
from rollout_service.protocol import delta, delta_parts
from rollout_service.protocol.delta_parts import TensorChange, encode_header
from rollout_service.protocol.upload import (
    DTYPE_BYTES,
    BeginUpload,
    CommitUpload,
    Delta,
    RollBack,
    UploadPlan,
    base_digest,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import tensor_digests
from tests.support.tensor_changes import encode
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, open_files, scattered, started

UP_PROJ = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
Stored = dict[str, torch.Tensor]
Changes = dict[str, Change]
"""Of tensors that change."""


def digest_of(tensor: torch.Tensor) -> str:
    return tensor_digests(tensor_bytes(tensor))[0]


class DeltaTrainer(Trainer):
    """Sends what changed, and may lie about it."""

    async def stored(self, weights: Weights) -> Stored:
        """``weights`` as the service stores them."""
        return dict(Converter(await self._ingest.recipe()).convert(weights.items()))

    async def begin_delta(
        self, version: int, base: int, old: Stored, new: Stored, **lies: object
    ) -> tuple[UploadPlan, list[bytes]]:
        """Announce it; returns the parts that are to be sent, too."""
        announced, changes = delta_of(version, base, old, new)
        if lies:
            assert announced.delta is not None
            announced = announced.model_copy(update={"delta": announced.delta.model_copy(update=lies)})
        return await self._ingest.begin(announced), parts_of(announced, changes)

    async def send_changes(self, announced: BeginUpload, changes: Changes) -> UploadPlan:
        """Announce, and send all that changes."""
        plan = await self._ingest.begin(announced)
        await self.send(plan, parts_of(announced, changes))
        return plan

    async def push_delta(self, version: int, base: int, old: Stored, new: Stored) -> WeightStatus:
        """All of it."""
        await self.send(*await self.begin_delta(version, base, old, new))
        return await self._ingest.commit(version, CommitUpload())


def delta_of(version: int, base: int, old: Stored, new: Stored) -> tuple[BeginUpload, Changes]:
    """Announcement of a sound delta, and what it changes."""
    begin, changes = begin_of(version, new), {}
    for tensor in begin.tensors:
        before, after = tensor_bytes(old[tensor.name]), tensor_bytes(new[tensor.name])
        if encoded := encode(before, after, DTYPE_BYTES[tensor.dtype]):
            changes[tensor.name] = Change(memoryview(encoded), digest_of(new[tensor.name]))
    of_base = base_digest(digest_of(old[tensor.name]) for tensor in begin.tensors)
    return begin.model_copy(update={"delta": Delta(base=base, base_digest=of_base)}), changes


def parts_of(announced: BeginUpload, changes: Changes) -> list[bytes]:
    """As they are sent."""
    return [part_of(announced, changes, number) for number in range(len(announced.delta_parts))]


def part_of(announced: BeginUpload, changes: Changes, number: int) -> bytes:
    """One of them."""
    tensors = announced.delta_parts[number]
    told = [changes.get(announced.tensors[at].name) for at in tensors]
    header = encode_header(
        tensors.start, [None if each is None else TensorChange(each.encoded.nbytes, each.digest) for each in told]
    )
    return header + b"".join(each.encoded for each in told if each is not None)


PART_BYTES = 12 << 10


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a delta of a small model."""
    monkeypatch.setattr(delta_parts, "LEAST_TENSOR_BYTES", 1000)


@pytest.fixture(scope="module")
def base_log(model: Path, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with version 1, which most deltas here are of."""
    root = tmp_path_factory.mktemp("base") / "log"

    async def push() -> None:
        async with started(config_of(model, root, weights={"part_bytes": PART_BYTES})) as ingest:
            await Trainer(ingest).push(1, changed(weights, 0.25))

    asyncio.run(push())
    return root


@pytest.fixture
def config(model: Path, base_log: Path, tmp_path: Path) -> ServiceConfig:
    shutil.copytree(base_log, tmp_path / "log")
    return config_of(model, tmp_path / "log", weights={"part_bytes": PART_BYTES})


@pytest.fixture
async def trainer(ingest: Ingest) -> DeltaTrainer:
    return DeltaTrainer(ingest)


@pytest.fixture
async def old(trainer: DeltaTrainer, weights: Weights) -> Stored:
    """What version 1 of the log stores."""
    return await trainer.stored(changed(weights, 0.25))


@pytest.fixture
async def new(trainer: DeltaTrainer, weights: Weights) -> Stored:
    """What a version 2 is to store."""
    return await trainer.stored(scattered(changed(weights, 0.25), 2))


def require_stored(log: WeightLog, version: int, expected: Mapping[str, torch.Tensor]) -> None:
    """A version is sound and stores these tensors."""
    manifest = log.manifest(version)
    log.verify(manifest)
    assert {tensor.name: tensor.digest for tensor in manifest.tensors} == {n: digest_of(t) for n, t in expected.items()}


class TestApplied:
    async def test_it_makes_the_version_of_all_tensors_in_any_order_of_parts(self, trainer, log, old, new, monkeypatch):
        monkeypatch.setattr("rollout_service.ingest.upload_session.BATCH_BYTES", 1)  # each applied in batches
        plan, parts = await trainer.begin_delta(2, 1, old, new)
        assert plan.num_parts > 5
        await trainer.send(plan, parts, reversed(plan.missing_parts))
        by_delta = await trainer._ingest.commit(2, CommitUpload())
        require_stored(log, 2, new)
        assert (await trainer.push(3, new)).digest == by_delta.digest

    async def test_tensors_are_made_before_all_parts_have_come(self, trainer, ingest, old, new):
        plan, parts = await trainer.begin_delta(2, 1, old, new)
        staged = ingest.staged(2)
        await trainer.send(plan, parts, [3])
        names = [staged.begin.tensors[number].name for number in staged.begin.delta_parts[3]]
        while len(staged._conversion._read) < len(names) and staged.failure is None:
            await asyncio.sleep(0.01)
        assert set(staged._conversion._read) == set(names) and staged.failure is None

    async def test_a_tensor_of_many_stretches(self, trainer, log, weights, monkeypatch):
        monkeypatch.setattr("rollout_service.store.manifest.CHUNK_BYTES", 4096)
        monkeypatch.setattr(delta, "SEGMENT_BYTES", 1024)
        monkeypatch.setattr("rollout_service.ingest.sources.delta._STRETCH_SEGMENTS", 3)
        old, new = await trainer.stored(weights), await trainer.stored(scattered(weights, 2))
        await trainer.push(2, old)
        assert max(len(list(tensor.chunks())) for tensor in log.manifest(2).tensors) > 12
        await trainer.push_delta(3, 2, old, new)
        require_stored(log, 3, new)

    async def test_a_part_that_takes_another_ones_place_is_applied_to_the_base_again(self, trainer, log, old, new):
        announced, changes = delta_of(2, 1, old, new)
        plan = await trainer._ingest.begin(announced)
        parts, first = parts_of(announced, changes), announced.tensors[announced.delta_parts[1].start].name
        # of two tensors, one is told as it was, the other's changes are damaged
        damaged = {**changes, UP_PROJ: Change(memoryview(b"\x07" + changes[UP_PROJ].encoded[1:]), "ab" * 16)}
        del damaged[first]
        await trainer.send(plan, parts_of(announced, damaged))
        await trainer.send(plan, parts)
        await trainer._ingest.commit(2, CommitUpload())
        require_stored(log, 2, new)

    async def test_it_leaves_no_file_open(self, trainer, ingest, old, new):
        before = open_files()
        await trainer.push_delta(2, 1, old, new)
        await trainer.begin_delta(3, 2, new, old)
        await ingest.discard(3)
        for base in (7, 1):
            with pytest.raises(DeltaBaseGone):
                await trainer.begin_delta(9, base, new, old)
        assert open_files() == before


class TestBase:
    async def test_a_base_that_is_not_in_the_log_is_refused_at_once(self, trainer, ingest, log, old, new):
        announced, _ = delta_of(2, 1, old, new)
        other = msgspec.structs.replace(log.manifest(1).recipe, scales="power_of_two")
        with pytest.raises(DeltaBaseGone, match=r"of version 1, .* it was quantized otherwise than versions are now"):
            DeltaOfVersion(log, announced, other, Converter(await ingest.recipe()))
        for base, lie, complaint in (
            (7, {}, r"version 7 is not in the log; it holds \[0, 1\]"),
            (0, {}, r"its tensors hash to \w{32}, and not to \w{32} as the delta says"),
            (1, {"base_digest": "0" * 32}, "its tensors hash to"),
        ):
            what = f"version 9 comes as a delta of version {base}, which cannot be changed: .*{complaint}.* Push the"
            with pytest.raises(DeltaBaseGone, match=what):
                await trainer.begin_delta(9, base, old, new, **lie)
        assert [status.version for status in await ingest.versions()] == [0, 1]

    async def test_tensors_as_the_base_does_not_store_them_are_refused(self, trainer, old, new):
        wide = {name: t.float() if name == NORM else t for name, t in new.items()}
        with pytest.raises(
            DeltaBaseGone, match=rf"{NORM} is announced as float32\[256\], and it holds bfloat16\[256\]"
        ):
            await trainer.begin_delta(2, 1, {**old, NORM: old[NORM].float()}, wide)
        with pytest.raises(InvalidManifest, match="unknown: other"):
            await trainer.begin_delta(2, 1, {**old, "other": old[NORM]}, {**new, "other": new[NORM]})

    async def test_it_stays_in_the_log_while_a_delta_of_it_is_staged(self, trainer, ingest, log, old, new):
        await trainer.push_delta(2, 1, old, new)
        plan, parts = await trainer.begin_delta(5, 1, old, new)
        await trainer.push_delta(3, 2, new, old)
        await trainer.push_delta(4, 3, old, new)
        assert log.versions() == [1, 3, 4]
        await trainer.send(plan, parts)
        await ingest.commit(5, CommitUpload())
        require_stored(log, 5, new)
        assert log.versions() == [4, 5]
        await trainer.begin_delta(9, 4, new, old)
        await ingest.discard(9)  # a delta that is dropped keeps no base
        await trainer.push_delta(6, 5, new, old)
        await trainer.push_delta(7, 6, old, new)
        assert log.versions() == [6, 7]

    async def test_one_that_an_operator_removes_is_read_to_the_end_all_the_same(self, trainer, ingest, log, old, new):
        await trainer.push_delta(2, 1, old, {**new, NORM: old[NORM]})
        require_stored(log, 2, {**new, NORM: old[NORM]})
        plan, parts = await trainer.begin_delta(3, 1, old, new)
        log.drop(1)
        await trainer.send(plan, parts)
        await ingest.commit(3, CommitUpload())
        require_stored(log, 3, new)

    async def test_one_that_is_cut_off_is_told(self, trainer, log, old, new):
        last = max(log.manifest(1).tensors, key=lambda tensor: (tensor.file, tensor.offset))
        with (log.folder(1) / last.file).open("r+b") as file:
            file.truncate(last.offset + last.nbytes - 3)
        with pytest.raises(DeltaBaseGone, match=f"{last.file} ends 3 bytes early, in {last.name}"):
            await trainer.push_delta(2, 1, old, new)
        await trainer.push(2, new)
        require_stored(log, 2, new)


def other_change(move: int, add: int) -> Callable[[bytes], bytes]:
    """A sound encoding of a change at another place, or by another amount."""

    def change(encoded: bytes) -> bytes:
        (segment,) = delta.changed_segments(memoryview(encoded), 1 << 20, 1)
        positions, differences = delta.decode_changes(segment, 1 << 20, 1)
        positions[-1] += move
        differences[-1] = (int(differences[-1]) + add) % 256
        return delta.encode_changes(positions, differences, 1 << 20) or b""

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "kind of segment": lambda encoded: bytes([encoded[0] ^ 4]) + encoded[1:],
    "one position": other_change(1, 0),
    "one difference": other_change(0, 1),
    "half cut off": lambda encoded: encoded[: len(encoded) // 2],
    "of another tensor": lambda encoded: delta.encode_whole(memoryview(b"\x00" * 7)),
}
"""How the planes themselves may be damaged: ``tests/unit/protocol/test_delta.py``."""


class TestCorrupted:
    async def test_whatever_is_damaged_is_refused_by_name_and_the_version_can_be_pushed_as_a_whole(
        self, trainer, ingest, log, old, new
    ):
        one = {**old, UP_PROJ: new[UP_PROJ]}
        announced, changes = delta_of(2, 1, old, one)
        honest = changes[UP_PROJ]
        for what, damage in DAMAGE.items():
            damaged = honest._replace(encoded=memoryview(damage(bytes(honest.encoded))))
            await trainer.send_changes(announced, {UP_PROJ: damaged})
            why = f"version 2: the changes of {UP_PROJ} since version 1 .*push the wh"
            with pytest.raises(InvalidDelta, match=why) as refused:
                await ingest.commit(2, CommitUpload())
            assert (await ingest.fleet()).latest_version == 1, what
            assert refused.value.detail == {"version": 2, "base": 1, "tensor": UP_PROJ}
            staged = await ingest.status(2)
            assert staged.error is not None and staged.error.type == "InvalidDelta"
        await trainer.push(2, one)
        require_stored(log, 2, one)

    @pytest.mark.parametrize("at_fault", ["base", "changes"])
    async def test_damage_that_makes_a_nan_is_told_from_weights_that_are_none(
        self, trainer, ingest, log, old, new, at_fault
    ):
        codes = tensor_bytes(new[UP_PROJ])
        at = next(i for i, (a, b) in enumerate(zip(tensor_bytes(old[UP_PROJ]), codes, strict=True)) if a != b)
        announced, changes = delta_of(2, 1, old, {**old, UP_PROJ: new[UP_PROJ]})
        if at_fault == "base":
            stored = next(tensor for tensor in log.manifest(1).tensors if tensor.name == UP_PROJ)
            with (log.folder(1) / stored.file).open("r+b") as file:
                file.seek(stored.offset + at)
                file.write(bytes([(0x7F - codes[at] + tensor_bytes(old[UP_PROJ])[at]) % 256]))
            error, what = DeltaBaseGone, rf"{UP_PROJ} in {stored.file}: chunk 0 of 1"
        else:
            (segment,) = delta.changed_segments(changes[UP_PROJ].encoded, len(codes), 1)
            positions, differences = delta.decode_changes(segment, len(codes), 1)
            differences[0] = (int(differences[0]) + 0x7F - codes[at]) % 256
            damaged = delta.encode_changes(positions, differences, len(codes)) or b""
            changes[UP_PROJ] = changes[UP_PROJ]._replace(encoded=memoryview(damaged))
            error, what = InvalidDelta, f"the changes of {UP_PROJ} since version 1 make a tensor that hashes to"
        await trainer.send_changes(announced, changes)
        with pytest.raises(error, match=what):
            await ingest.commit(2, CommitUpload())

    async def test_a_result_other_than_announced_fails_the_version_by_name(self, trainer, ingest, old, new):
        announced, changes = delta_of(2, 1, old, new)
        honest = changes[NORM]
        await trainer.send_changes(announced, {**changes, NORM: honest._replace(digest="ab" * 16)})
        said = f"the changes of {NORM} since version 1 make a tensor that hashes to {honest.digest}, and not to abab"
        with pytest.raises(InvalidDelta, match=re.escape(said)):
            await ingest.commit(2, CommitUpload())
        assert (await ingest.fleet()).latest_version == 1
        broken = {**new, NORM: new[NORM].clone()}
        broken[NORM][3] = torch.nan
        with pytest.raises(QuantizationError, match=rf"{NORM}\[3\] is nan"):
            await trainer.push_delta(2, 1, old, broken)

    async def test_announcements_that_cannot_be(self, old, new):
        known = delta_of(2, 1, old, new)[0].model_dump()
        for lie, complaint in (
            ({"delta": {**known["delta"], "base": 2}}, "version 2 cannot be a delta of version 2"),
            ({"delta": {**known["delta"], "changes": []}}, "Extra inputs are not permitted"),
            ({"tensors": [], "source": {"path": "/tmp/weights"}}, "give tensors, and no source"),
        ):
            with pytest.raises(ValidationError, match=complaint):
                BeginUpload.model_validate({**known, **lie})


class TestUnsoundParts:
    """Each is refused as it comes, and leaves the version what it was: the sound part may follow."""

    async def test_it_is_refused_by_name(self, trainer, ingest, log, old, new):
        plan, parts = await trainer.begin_delta(2, 1, old, new)
        sound = parts[1]
        for unsound, complaint in (
            (parts[2], r"it is about \d+ tensors from number \d+ on, and is to be about \d+ from number"),
            (sound[:5], "it has 5 bytes, fewer than its header"),
            (sound[:12], "it has 12 bytes, fewer than its header"),
            (sound[:-1], r"it has \d+ bytes, and by its header \d+"),
            (sound + b"\x00", r"it has \d+ bytes, and by its header \d+"),
            (sound[:4] + b"\xff" * 4 + sound[8:], "it is about 4294967295 tensors"),
            (sound[:8] + b"\xff" * 8 + sound[16:], r"it has \d+ bytes, and by its header \d+"),
        ):
            reply = await trainer.put(2, 1, unsound)
            assert reply.status_code == 422
            error = reply.json()["error"]
            assert error["type"] == "InvalidDelta" and error["detail"] == {"version": 2, "base": 1, "part": 1}
            assert re.search(
                f"version 2: part 1 of its changes since version 1 cannot be read: {complaint}", str(error)
            )
            assert (await ingest.status(2)).missing_parts == plan.missing_parts
        await trainer.send(plan, parts)
        await ingest.commit(2, CommitUpload())
        require_stored(log, 2, new)

    async def test_more_changes_than_the_tensor_has_bytes(self, trainer, ingest, old, new):
        announced, _ = delta_of(2, 1, old, new)
        await ingest.begin(announced)
        number, tensors = next((i, part) for i, part in enumerate(announced.delta_parts) if len(part) > 2)
        told = [announced.tensors[at] for at in tensors]
        least = min(told, key=lambda tensor: tensor.nbytes)
        longer = {least.name: Change(memoryview(bytes(least.nbytes + least.nbytes // 1024 + 2)), "ab" * 16)}
        reply = await trainer.put(2, number, part_of(announced, longer, number))
        assert reply.status_code == 422 and f"bytes of changes, more than its own {least.nbytes}" in reply.text
        most = delta_parts.most_bytes([tensor.nbytes for tensor in told])
        reply = await trainer.put(2, number, bytes(most + 1))
        assert reply.status_code == 413 and reply.json()["error"]["detail"] == {"limit_bytes": most}


class TestAgain:
    async def test_the_same_delta_goes_on_until_it_is_committed(self, trainer, ingest, log, old, new):
        plan, parts = await trainer.begin_delta(2, 1, old, new)
        await trainer.send(plan, parts, plan.missing_parts[:3])
        again, _ = await trainer.begin_delta(2, 1, old, new)
        assert again.missing_parts == plan.missing_parts[3:]
        _, others = await trainer.begin_delta(2, 1, old, old)
        await trainer.send(again, parts)
        await ingest.commit(2, CommitUpload())
        require_stored(log, 2, new)
        committed, _ = await trainer.begin_delta(2, 1, old, new)
        assert (committed.state, committed.missing_parts, len(committed.digests)) == ("committed", (), plan.num_parts)
        assert (await trainer.put(2, 1, parts[1])).status_code == 200
        reply = await trainer.put(2, 1, others[1])
        assert reply.status_code == 409 and "version 2 is committed, and its part 1 hashes to" in reply.text

    async def test_a_delta_of_another_base_begins_anew(self, trainer, ingest, old, new):
        await trainer.push_delta(2, 1, old, old)
        plan, parts = await trainer.begin_delta(3, 1, old, new)
        await trainer.send(plan, parts)
        assert (await trainer.begin_delta(3, 2, old, new))[0].digests == {}
        assert (await ingest.begin(begin_of(3, new))).digests == {}

    @pytest.mark.parametrize("parts", [3, None], ids=["some", "all"])
    async def test_a_restarted_ingest_goes_on_with_the_parts_that_are_there(
        self, trainer, restarted, log, old, new, parts
    ):
        plan, every = await trainer.begin_delta(2, 1, old, new)
        await trainer.send(plan, every, plan.missing_parts[:parts])
        ingest = await restarted()
        left = () if parts is None else plan.missing_parts[parts:]
        assert (await ingest.status(2)).missing_parts == left
        other = DeltaTrainer(ingest)
        again, _ = await other.begin_delta(2, 1, old, new)
        await other.send(again, every)
        assert (await ingest.commit(2, CommitUpload())).state == "committed"
        require_stored(log, 2, new)
        assert (await other.push(3, new)).digest == (await ingest.status(2)).digest

    async def test_a_restarted_ingest_drops_it_if_the_base_is_gone(self, trainer, restarted, log, old, new):
        await trainer.push_delta(2, 1, old, old)
        plan, parts = await trainer.begin_delta(3, 1, old, new)
        await trainer.send(plan, parts)
        log.drop(1)
        ingest = await restarted()
        with pytest.raises(NotFound, match=r"3\.parts cannot be taken up again: .*version 1 is not in the log"):
            await ingest.status(3)
        assert not list((log.root / "staging").iterdir())
        await DeltaTrainer(ingest).push(3, new)
        require_stored(log, 3, new)

    async def test_a_rollback_of_a_version_that_came_as_a_delta(self, trainer, ingest, log, old, new):
        await trainer.push_delta(2, 1, old, new)
        await trainer.push_delta(3, 2, new, old)
        await ingest.roll_back(RollBack(to=2))
        require_stored(log, 4, new)
        await trainer.push_delta(5, 4, new, old)
        require_stored(log, 5, old)
