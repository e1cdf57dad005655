"""The life of a version in the ingest: begun, uploaded, converted, committed, and what is refused on the way."""

import pytest
import torch
from safetensors.torch import save_file

from rollout_service.errors import (
    DeltaBaseGone,
    Forbidden,
    InvalidManifest,
    NotFound,
    QuantizationError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.protocol.upload import BeginUpload, CommitUpload, Delta, PathSource
from tests.unit.ingest import expected
from tests.unit.ingest.trainer import PART_BYTES, begin_of, changed

UP_PROJ = "model.layers.0.mlp.up_proj.weight"


class TestUpload:
    async def test_version_0_is_made_from_the_models_folder(self, ingest, log, weights, fingerprint):
        status = await ingest.status(0)
        assert status.state == "committed" and status.digest == expected.digest(weights, fingerprint)
        assert [s.version for s in await ingest.versions()] == [0]
        assert log.head() is not None
        log.verify(log.manifest(0))

    async def test_the_digest_is_that_of_an_independent_conversion(self, trainer, weights, fingerprint):
        generator = torch.Generator().manual_seed(1)
        sent = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
        for version, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16), start=1):
            as_sent = {name: tensor.to(dtype) for name, tensor in sent.items()}
            status = await trainer.push(version, as_sent)
            assert status.digest == expected.digest(as_sent, fingerprint)
        assert status.state == "committed" and status.version == 3
        assert status.total_bytes == sum(len(data) for *_, data in expected.stored(as_sent))

    async def test_parts_and_tensors_may_come_in_any_order(self, trainer, weights, fingerprint, ingest):
        sent = dict(reversed(changed(weights, 0.5).items()))
        parts = begin_of(1, sent).num_parts(PART_BYTES)
        await trainer.upload(1, sent, order=[*range(1, parts, 2), *reversed(range(0, parts, 2))])
        assert (await ingest.commit(1, CommitUpload())).digest == expected.digest(sent, fingerprint)

    async def test_without_quantization_every_tensor_is_stored_in_bf16(
        self, start, model, tmp_path, weights, fingerprint
    ):
        ingest = await start(model, tmp_path / "log", quant={"weights": "none"})
        assert (await ingest.status(0)).digest == expected.digest(weights, fingerprint, fp8=False)

    async def test_a_commit_before_all_parts_came_lists_those_missing(self, ingest, trainer, weights):
        plan = await trainer.upload(1, weights, order=[0, 3])
        with pytest.raises(UploadIncomplete, match=f"lacks {plan.num_parts - 2} of {plan.num_parts} parts") as refused:
            await ingest.commit(1, CommitUpload())
        lacking = [part for part in range(plan.num_parts) if part not in (0, 3)]
        assert refused.value.detail["missing_parts"] == lacking
        assert (await ingest.status(1)).missing_parts == tuple(lacking)
        again = await ingest.begin(begin_of(1, weights))
        assert again.missing_parts == tuple(lacking)
        await trainer.upload(1, weights, order=lacking)
        assert (await ingest.commit(1, CommitUpload())).state == "committed"

    async def test_the_same_commit_again_gets_the_same_answer(self, ingest, trainer, weights):
        first = await trainer.push(1, weights)
        assert await ingest.commit(1, CommitUpload()) == first
        await trainer.push(2, weights)
        assert await ingest.commit(1, CommitUpload()) == first

    async def test_a_staged_version_older_than_a_commit_is_dropped(self, ingest, trainer, weights, log):
        await trainer.upload(3, weights)
        await trainer.push(4, weights)
        with pytest.raises(VersionConflict, match="version 3 is not newer"):
            await ingest.commit(3, CommitUpload())
        assert [s.version for s in await ingest.versions()] == [0, 4]
        assert list((log.root / "staging").iterdir()) == []

    async def test_another_table_under_a_staged_version_begins_anew(self, ingest, trainer, weights):
        await trainer.upload(1, weights, order=[0])
        wider = {name: tensor.float() for name, tensor in weights.items()}
        assert (await ingest.begin(begin_of(1, wider))).missing_parts[0] == 0

    async def test_a_table_that_does_not_fit_leaves_nothing_staged(self, ingest, weights, log):
        unfit = {**weights, "stranger": torch.zeros(1)}
        del unfit[UP_PROJ]
        for _ in range(2):  # its table is not kept
            with pytest.raises(InvalidManifest) as refused:
                await ingest.begin(begin_of(1, unfit))
            assert refused.value.detail == {"unknown": ["stranger"], "missing": [UP_PROJ]}
        assert [s.version for s in await ingest.versions()] == [0]

    async def test_a_refused_announcement_leaves_the_upload_before_alone(self, ingest, trainer, weights):
        await trainer.upload(1, weights, order=[0])
        unfit = begin_of(1, {**weights, "stranger": torch.zeros(1)})
        groundless = begin_of(1, weights).model_copy(update={"delta": Delta(base=0, base_digest="0" * 32)})
        for refused in (unfit, groundless):
            with pytest.raises((InvalidManifest, DeltaBaseGone)):
                await ingest.begin(refused)
        assert (await ingest.status(1)).missing_parts[0] == 1

    @pytest.mark.parametrize("name", [UP_PROJ, "model.embed_tokens.weight"], ids=["quantized", "kept in BF16"])
    async def test_a_nan_fails_the_version_and_names_its_tensor_and_index(
        self, ingest, trainer, weights, name, fingerprint
    ):
        broken = changed(weights, 0.0)
        broken[name][5, 7] = float("nan")
        await trainer.upload(1, broken)
        for _ in range(2):
            with pytest.raises(QuantizationError, match=rf"{name}\[5, 7\] is nan") as refused:
                await ingest.commit(1, CommitUpload())
        assert refused.value.detail == {"tensor": name, "index": [5, 7], "count": 1}
        error = (await ingest.status(1)).error
        assert error is not None and (error.type, error.message) == ("QuantizationError", refused.value.message)
        assert (await ingest.fleet()).latest_version == 0
        sound = changed(weights, 1.0)
        assert (await trainer.push(1, sound)).digest == expected.digest(sound, fingerprint)

    async def test_a_staged_version_can_be_discarded(self, ingest, trainer, weights, log):
        await trainer.upload(1, weights)
        await ingest.discard(1)
        with pytest.raises(NotFound):
            await ingest.status(1)
        assert list((log.root / "staging").iterdir()) == []
        assert (await trainer.push(1, weights)).state == "committed"

    async def test_what_is_committed_or_not_there_cannot_be_discarded(self, ingest):
        with pytest.raises(VersionConflict, match="a commit is final"):
            await ingest.discard(0)
        for ask in (ingest.discard, lambda version: ingest.commit(version, CommitUpload())):
            with pytest.raises(NotFound, match=r"version 7 is not staged \(staged: \[\]\)"):
                await ask(7)
        assert (await ingest.status(0)).state == "committed"


class TestPath:
    async def test_weights_are_read_from_a_path_below_an_allowed_root(
        self, start, model, tmp_path, weights, fingerprint
    ):
        allowed, sent = tmp_path / "sources", changed(weights, 0.125)
        allowed.mkdir()
        ingest = await start(model, tmp_path / "log", weights={"source_roots": [allowed]})
        with pytest.raises(Forbidden):
            await ingest.begin(BeginUpload(version=1, source=PathSource(path=model)))
        save_file(sent, allowed / "model.safetensors")
        plan = await ingest.begin(BeginUpload(version=1, source=PathSource(path=allowed)))
        assert plan.num_parts == 0 and plan.missing_parts == ()
        assert (await ingest.commit(1, CommitUpload())).digest == expected.digest(sent, fingerprint)
