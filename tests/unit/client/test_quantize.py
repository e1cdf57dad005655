"""Weights that the trainer quantizes before it sends them, into the real ingest and into one that breaks down."""

from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_service.client import RolloutClient
from rollout_service.client._tensors import describe
from rollout_service.errors import InvalidManifest, QuantizationError, Unauthorized
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.protocol.weights import WeightStatus
from tests.support.models import make_model
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.client.service import Service

Tensors = dict[str, torch.Tensor]
FAMILIES = ["qwen2", "qwen3_moe", "mixtral", "deepseek_v3"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of ``FAMILIES``."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder / family, family) for family in FAMILIES}


def module_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def moved(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Other weights, whose rounding to BF16 matters if ``dtype`` is wider."""
    return {name: (tensor.to(dtype) * 1.37 + 0.011).to(dtype) for name, tensor in tensors.items()}


@pytest.fixture
async def moe(models: dict[str, Path], tmp_path: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(models["qwen3_moe"], tmp_path / "log") as ingest:
        yield ingest


@pytest.fixture
async def moe_client(moe: RealIngest) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(moe.url) as client:
        yield client


@pytest.fixture(scope="session")
def stacked(models: dict[str, Path]) -> Tensors:
    return dict(module_of(models["qwen3_moe"]).state_dict())


async def push(client: RolloutClient, version: int, tensors: object, **options: object) -> WeightStatus:
    options = {"quantize": "trainer", "wait": "none", **options}
    return await client.push_weights(version, tensors, **options)


class TestSameVersion:
    @pytest.mark.parametrize(
        ("family", "dtypes"),
        [
            *product(["qwen2", "qwen3_moe"], [(torch.bfloat16, torch.float16, torch.float32)]),
            *product(["mixtral", "deepseek_v3"], [(torch.float32,)]),
        ],
        ids=FAMILIES,
    )
    async def test_whoever_quantizes_the_version_is_the_same(self, models, tmp_path, family, dtypes):
        on_disk, in_memory = load_file(models[family] / "model.safetensors"), module_of(models[family]).state_dict()
        async with real_ingest(models[family], tmp_path / "log") as service, RolloutClient(service.url) as client:
            first, version = await client.weights(0), 0
            for dtype, tensors in product(dtypes, (on_disk, in_memory)):  # names and shapes of both kinds
                pushed = moved(tensors, dtype)
                by_service = await push(client, version + 1, pushed, quantize="service")
                by_trainer = await push(client, version + 2, pushed)
                assert by_trainer.digest == by_service.digest != first.digest, (dtype, tensors is on_disk)
                version += 2
                service.log.verify(service.log.manifest(version))

    async def test_half_the_bytes_are_sent(self, moe, moe_client, stacked):
        totals: dict[str, int] = {}
        for version, who in enumerate(("service", "trainer"), start=1):
            await push(
                moe_client,
                version,
                stacked,
                quantize=who,
                progress=lambda _, total, who=who: totals.update({who: total}),
            )
        assert totals["service"] == sum(tensor.nbytes for tensor in stacked.values())
        assert 0.5 < totals["trainer"] / totals["service"] < 0.55
        assert totals["trainer"] == (await moe_client.weights(2)).total_bytes

    @pytest.mark.parametrize("knows_table", [True, False], ids=["table", "no table"])
    @pytest.mark.parametrize(
        ("transport", "quantize"),
        [*product(["http", "shared_memory"], ["service", "trainer"]), ("delta", "trainer")],
        ids=str,
    )
    async def test_a_generator_with_one_buffer_makes_the_same_version(
        self, moe_client, models, transport, quantize, knows_table
    ):
        """The second push of a delta sends changes."""
        tensors = load_file(models["qwen3_moe"] / "model.safetensors")
        table = [describe(name, tensor) for name, tensor in tensors.items()] if knows_table else None
        buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()), dtype=torch.bfloat16)

        def through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

        for version in (1, 3):
            source = through_one_buffer()
            status = await push(moe_client, version, source, tensor_table=table, transport=transport, quantize=quantize)
            right = await push(moe_client, version + 1, tensors, transport="http", quantize="service")
            assert status.digest == right.digest
            tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1

    async def test_the_recipe_is_told_only_to_those_who_may_push(self, models, tmp_path):
        async with real_ingest(models["qwen2"], tmp_path / "log", token="secret") as service:
            async with RolloutClient(service.url) as stranger:
                with pytest.raises(Unauthorized):
                    await push(stranger, 1, module_of(models["qwen2"]))
            async with RolloutClient(service.url, token="secret") as client:
                assert (await push(client, 1, module_of(models["qwen2"]))).state == "committed"


@pytest.fixture
def small(service: Service) -> Tensors:
    """Ten parts of 1024 bytes once they are quantized, and a few bytes of scales."""
    service.recipe = TrainerRecipe(weights="fp8_block", quantized=tuple(f"layer{i}" for i in range(10)))
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}": torch.randn(16, 64, generator=generator) for i in range(10)}


class TestRefused:
    @pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.embed_tokens.weight"])
    async def test_a_nan_is_named_before_commit_and_a_fixed_push_resumes(self, moe, moe_client, stacked, name):
        broken = {n: t.clone() for n, t in stacked.items()}
        broken[name][(3,) * broken[name].dim()] = float("nan")
        stored = name if name in moe.ingest._model.shapes else "model.layers.1.mlp.experts.3.down_proj.weight"
        with pytest.raises(QuantizationError, match=rf"{stored}\[3, 3\] is nan.*Version 1 stays staged.*discard\(1\)"):
            await push(moe_client, 1, broken)
        status = await moe_client.weights(1)
        assert status.state == "staged" and status.missing_parts
        assert (await moe_client.fleet()).latest_version == 0
        assert (await push(moe_client, 1, stacked)).digest == (await moe_client.weights(0)).digest

    async def test_wrong_names_and_shapes_are_refused_before_quantization(self, moe_client, stacked):
        unfit = dict(stacked)
        unfit["stranger"] = unfit.pop("model.norm.weight")
        unfit["model.layers.0.self_attn.q_proj.weight"] = torch.full((2, 2, 2), float("nan"))
        with pytest.raises(InvalidManifest) as refused:
            await push(moe_client, 1, unfit)
        assert refused.value.detail["unknown"] == ["stranger"] and refused.value.detail["missing"] == [
            "model.norm.weight"
        ]
        assert "q_proj.weight is [2, 2, 2], the model's is [256, 256]" in refused.value.detail["wrong_shape"][0]

    async def test_indivisible_stacked_experts_are_refused_by_name(self, moe_client, stacked):
        name = "model.layers.0.mlp.experts.gate_up_proj"
        with pytest.raises(ValueError, match=rf"{name} .*\[8, 255, 256\]"):
            await push(moe_client, 1, {**stacked, name: stacked[name][:, 1:]})


class TestResume:
    async def test_a_rank_that_does_not_send_quantizes_nothing(self, service, client, small):
        read: list[str] = []

        def generator() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in small.items():
                read.append(name)
                yield name, tensor * float("nan")

        assert await push(client, 5, generator(), send=False) is None
        assert read == list(small) and service.log == []

    async def test_only_a_quantizing_trainer_asks_for_the_recipe(self, service, client, small):
        await push(client, 1, small, quantize="service")
        assert service.calls("GET", "/v1/weights/recipe") == 0
        await push(client, 2, small)
        assert service.calls("GET", "/v1/weights/recipe") == 1
