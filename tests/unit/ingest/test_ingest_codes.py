"""Weights that arrive as FP8 codes and scales: from a trainer that quantized them, or in a published checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_service.errors import InvalidManifest, QuantizationError
from rollout_service.ingest.ingest import Ingest
from rollout_service.model.convert import Converter
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.blockwise import dequantize_blockwise
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, folder_weights

UP_PROJ = "model.layers.0.mlp.up_proj.weight"
UP_SCALES = f"{UP_PROJ}_scale_inv"
PUBLISHED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


async def quantized(ingest: Ingest, weights: Weights) -> dict[str, torch.Tensor]:
    """``weights`` as the recipe of ``ingest`` says."""
    return dict(Converter(await ingest.recipe()).convert(weights.items()))


class TestCodes:
    async def test_the_recipe_names_what_is_quantized(self, ingest, weights):
        recipe = await ingest.recipe()
        projections = sorted(name for name in weights if name.endswith("_proj.weight"))
        expected = TrainerRecipe(weights="fp8_block", scales="fp32", quantized=tuple(projections))
        assert recipe.model_copy(update={"ignored": expected.ignored}) == expected
        assert "model.layers.0.self_attn.rotary_emb.inv_freq" in recipe.ignored

    async def test_the_recipe_names_the_kernels_and_the_kv_cache(self, start, model, tmp_path):
        ingest = await start(model, tmp_path / "log", scaling={"num_gpus": 1})
        before = await ingest.recipe()
        await ingest.choose_kv_cache(KVCacheChoice(dtype="bfloat16", why="its keys are too large"))
        after = await ingest.recipe()
        assert (before.kernels, before.kv_cache, after.kv_cache) == ("cuda_compiled", None, "bfloat16")
        fixed = Ingest(config_of(model, tmp_path / "log", kv_cache={"dtype": "fp8_e4m3"}))
        assert (await fixed.recipe()).kv_cache == "fp8_e4m3"

    async def test_codes_and_scales_make_the_same_version_as_the_weights(self, ingest, trainer, weights):
        sent = changed(weights, 0.25)
        codes = await quantized(ingest, sent)
        assert begin_of(2, codes).nbytes < 0.6 * begin_of(1, sent).nbytes
        mixed = {**sent, UP_PROJ: codes[UP_PROJ], UP_SCALES: codes[UP_SCALES]}
        pushed = [await trainer.push(version, each) for version, each in enumerate((sent, codes, mixed), start=1)]
        assert len({status.digest for status in pushed}) == 1

    @pytest.mark.parametrize("form", [FP8_CHANNEL, INT8_CHANNEL], ids=lambda form: form.name)
    async def test_codes_and_scales_of_channels_make_the_same_version_as_the_weights(
        self, start, form, model, tmp_path, weights
    ):
        ingest = await start(model, tmp_path / "log", quant={"weights": form.name})
        codes, manifest = await quantized(ingest, weights), WeightLog(tmp_path / "log").manifest(0)
        assert (manifest.recipe.weights, manifest.recipe.block) == (form.name, None)
        assert {t.dtype for t in manifest.tensors if t.name == UP_PROJ} == {form.codes}
        assert codes[f"{UP_PROJ}_scale"].shape == (codes[UP_PROJ].shape[0], 1)
        assert (await Trainer(ingest).push(1, codes)).digest == manifest.digest
        assert (await Trainer(ingest).push(2, weights)).digest == manifest.digest
        codes[f"{UP_PROJ}_scale"][1, 0] = float("nan")
        with pytest.raises(QuantizationError, match=rf"{UP_PROJ}_scale\[1, 0\] is nan, a channel scale that is not"):
            await Trainer(ingest).push(3, codes)
        in_fp8 = dict(Converter(TrainerRecipe(weights="fp8_block", quantized=(UP_PROJ,))).convert(weights.items()))
        with pytest.raises(InvalidManifest, match=f"1 unknown: {UP_SCALES}"):
            await Trainer(ingest).push(4, in_fp8)

    async def test_scales_of_powers_of_two_are_another_recipe(self, start, model, tmp_path, weights):
        ingest = await start(model, tmp_path / "log", quant={"scales": "power_of_two"})
        codes, manifest = await quantized(ingest, weights), WeightLog(tmp_path / "log").manifest(0)
        assert manifest.recipe.scales == "power_of_two"
        assert (torch.frexp(codes[UP_SCALES]).mantissa == 0.5).all()
        assert (await Trainer(ingest).push(1, codes)).digest == manifest.digest
        codes[UP_SCALES][1, 1] = 0.3
        with pytest.raises(QuantizationError, match=rf"{UP_SCALES}\[1, 1\] is 0\.3, no power of two, as quant\.scales"):
            await Trainer(ingest).push(2, codes)


def publish(model: Path, stored: Weights, folder: Path) -> Path:
    """The folder of an FP8 release of ``model``."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": PUBLISHED}))
    save_file(dict(stored), folder / "model.safetensors")
    return folder


@pytest.fixture
async def stored(ingest: Ingest, log: WeightLog) -> dict[str, torch.Tensor]:
    """What version 0 consists of, as its own file has it."""
    return load_file(log.folder(0) / "weights-00001.safetensors")


class TestPublished:
    async def test_version_0_may_be_a_published_fp8_checkpoint(self, start, tmp_path, moe_model):
        unquantized = await start(moe_model, tmp_path / "log")
        codes = await quantized(unquantized, folder_weights(moe_model))
        released = await start(publish(moe_model, codes, tmp_path / "fp8"), tmp_path / "log-of-released")
        assert (await released.status(0)).digest == (await unquantized.status(0)).digest

    async def test_published_scales_in_bf16_are_widened_exactly(self, start, model, tmp_path, stored):
        narrow = {n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in stored.items()}
        await start(publish(model, narrow, tmp_path / "fp8"), tmp_path / "log-of-released")
        kept = load_file(tmp_path / "log-of-released" / "0" / "weights-00001.safetensors")
        assert kept[UP_SCALES].dtype == torch.float32 and torch.equal(kept[UP_SCALES], narrow[UP_SCALES].float())
        assert not torch.equal(kept[UP_SCALES], stored[UP_SCALES])
        for each in (kept, stored):
            assert dequantize_blockwise(each[UP_PROJ], each[UP_SCALES]).isfinite().all()

    @pytest.mark.parametrize(
        ("said", "complaint"),
        [
            ({"weight_block_size": [64, 64]}, r"quant_method=fp8 and weight_block_size=\[64, 64\].*blocks of 128×128"),
            ({"quant_method": "compressed-tensors"}, r"quant_method=compressed-tensors .*give the unquantized weights"),
        ],
    )
    async def test_a_checkpoint_that_is_quantized_otherwise_is_refused(
        self, start, model, tmp_path, stored, said, complaint
    ):
        released = publish(model, stored, tmp_path / "fp8")
        config = json.loads((released / "config.json").read_text())
        config["quantization_config"] |= said
        (released / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidManifest, match=complaint):
            await start(released, tmp_path / "log-of-released")

    async def test_a_checkpoint_with_per_tensor_scales_is_refused(self, start, model, tmp_path, stored):
        per_tensor = {n.replace("_scale_inv", "_scale"): t for n, t in stored.items()}
        with pytest.raises(InvalidManifest, match=r"unknown: .*weight_scale\b.*missing: .*weight_scale_inv"):
            await start(publish(model, per_tensor, tmp_path / "fp8"), tmp_path / "log-of-released")
