"""Weights from the trainer's to the engine's: dense models and experts, through the project's own ingest and log."""

import re
from pathlib import Path

import pytest
import torch

from rollout_service.errors import EngineFailed
from rollout_service.quant.formats import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, WeightFormat
from rollout_service.store.manifest import MANIFEST_FILE, read_manifest
from tests.support.engine_layout import engine_digests, quantize
from tests.support.fp8_cache import CACHE_DTYPE
from tests.support.kv_scales import assert_held, some_scales
from tests.support.models import LM_HEAD, random_weights
from tests.support.one_engine import KV_CACHE_BYTES, OneEngine, mean_difference, running

UPDATES = 20
# Bounds on the mean of |Δ|, the difference of a token's logprob from the fp32 reference, over 256 tokens. Its sources
# are those of tests/engine/test_engine.py; seen: BF16 0.009, FP8 0.025 with experts and 0.043 without. The largest is
# not bounded: if a router's choice ever hangs on a rounding, both sides choose rightly and differently. Two experts in
# each other's place give 0.30, BF16 experts that miss an update 1.1.
BF16_MEAN, FP8_MEAN = 0.02, 0.06


def with_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The head as the engine has it: a tied one, which trainers need not send, is the embedding."""
    return {LM_HEAD: weights["model.embed_tokens.weight"], **weights}


def swapped(weights: dict[str, torch.Tensor], one: int, other: int) -> dict[str, torch.Tensor]:
    """The same weights, but two experts of every layer have changed places."""
    place = {str(one): str(other), str(other): str(one)}
    pattern = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
    return {pattern.sub(lambda found: place.get(found[0], found[0]), name): w for name, w in weights.items()}


def differing(held: dict[str, str], expected: dict[str, str]) -> set[str]:
    return {name for name in held.keys() | expected.keys() if held.get(name) != expected.get(name)}


async def updated_many_times(one: OneEngine, form: WeightFormat = FP8_BLOCK) -> tuple[dict[str, torch.Tensor], Path]:
    """Assert what the engine holds after the first load and after twenty updates; the last weights and their folder.

    Of an FP8 cache each version brings other scales, which are held after every update.
    """
    scaled = one.config.kv_cache.dtype == "fp8_e4m3"
    for version in range(1, UPDATES + 2):
        weights = random_weights(one.config.model.path, seed=version)
        folder = await one.update(version, weights, some_scales(version) if scaled else None)
        if scaled:
            assert_held(await one.kv_scales(), some_scales(version))
        if version in (1, UPDATES + 1):
            expected = engine_digests(quantize(with_head(weights), form=form))
            # what vLLM derives from DeepSeek's kv_b_proj is compared by logprobs alone
            assert {n for n in differing(await one.digests(), expected) if ".mla_attn.W_U" not in n} == set()
    return weights, folder


@pytest.mark.slow  # every run of the tests does the same with experts, whose attention is dense
async def test_a_dense_engine_holds_exact_fp8_weights_after_20_updates(tmp_path, monkeypatch):
    async with running("qwen2", tmp_path, monkeypatch) as one:
        _, folder = await updated_many_times(one)
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN


async def test_an_moe_engine_holds_exact_weights_and_scales_and_no_partial_load(tmp_path, monkeypatch):
    async with running("qwen3_moe", tmp_path, monkeypatch, kv_cache_dtype=CACHE_DTYPE) as one:
        weights, folder = await updated_many_times(one)
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN

        # an engine that gave its memory back holds the same when it has loaded the version again
        held = await one.digests()
        assert await one.sleep_and_wake(folder, UPDATES + 1) >= KV_CACHE_BYTES
        assert await one.digests() == held
        if one.config.kv_cache.dtype == "fp8_e4m3":
            assert_held(await one.kv_scales(), some_scales(UPDATES + 1))
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN

        # the checks above can fail: two experts in each other's place are seen by both
        other = await one.update(UPDATES + 2, swapped(weights, 2, 5))
        seen = differing(await one.digests(), engine_digests(quantize(weights)))
        layers, matrices = range(2), ("w13", "w2")
        experts = {f"model.layers.{n}.mlp.experts.routed_experts.{w}" for n in layers for w in matrices}
        assert seen == {e + part for e in experts for part in ("_weight", "_weight_scale_inv", "_weight.decoded")}
        assert await mean_difference(one, folder, fp8=True) > 3 * FP8_MEAN
        assert await mean_difference(one, other, fp8=True) < FP8_MEAN

        # an expert that received nothing is never served, although its layer received something
        manifest = read_manifest(folder)
        kept = tuple(tensor for tensor in manifest.tensors if ".1.mlp.experts.3.up_proj." not in tensor.name)
        assert len(kept) == len(manifest.tensors) - 2
        (folder / MANIFEST_FILE).write_bytes(manifest.replace(tensors=kept).to_json())
        with pytest.raises(EngineFailed, match=r"1 modules incomplete.*layers\.1\.mlp\.experts"):
            await one.load(folder, UPDATES + 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", INT8_CHANNEL),
        ("qwen3_moe", INT8_CHANNEL),
        ("mixtral", INT8_CHANNEL),
        ("deepseek_v3", INT8_CHANNEL),
        ("qwen2_moe", INT8_CHANNEL),
        ("qwen2", FP8_CHANNEL),
        ("qwen3_moe", FP8_CHANNEL),
        ("deepseek_v3", FP8_CHANNEL),
    ],
    ids=lambda value: value.name if isinstance(value, WeightFormat) else value,
)
async def test_engines_with_channels_hold_exact_weights_after_20_updates(family, form, tmp_path, monkeypatch):
    async with running(family, tmp_path, monkeypatch, quant=form.name) as one:
        _, folder = await updated_many_times(one, form)
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
        held = await one.digests()
        assert await one.sleep_and_wake(folder, UPDATES + 1) >= KV_CACHE_BYTES
        assert await one.digests() == held


@pytest.mark.slow
async def test_bf16_experts_follow_every_update(tmp_path, monkeypatch):
    async with running("qwen2_moe", tmp_path, monkeypatch, quant="none") as one:
        for version in range(1, UPDATES + 2):
            folder = await one.update(version, random_weights(one.config.model.path, seed=version))
            if version in (1, UPDATES + 1):
                assert await mean_difference(one, folder, fp8=False) < BF16_MEAN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "skip"),
    [
        ("llama", ()),
        ("mistral", ()),
        ("qwen3", ()),
        ("qwen2_moe", ()),
        ("mixtral", ("model.layers.1.block_sparse_moe.experts.*",)),
        ("deepseek_v3", ()),
    ],
)
async def test_every_family_is_served_from_its_own_names(family, skip, tmp_path, monkeypatch):
    async with running(family, tmp_path, monkeypatch, skip=skip) as one:
        for version in range(1, 3):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.update(version, weights)
        expected = engine_digests(quantize(weights, skip="|".join(skip) or "(?!)"))
        # compared by their logprobs alone: experts that vLLM packs, and what it derives from DeepSeek's kv_b_proj
        unlike = differing(await one.digests(), expected)
        assert all(re.search(r"\.1\.block_sparse_moe\.experts\.|\.mla_attn\.W_U", name) for name in unlike), unlike
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
        held = await one.digests()
        assert await one.sleep_and_wake(folder, 2) >= KV_CACHE_BYTES
        assert await one.digests() == held
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
