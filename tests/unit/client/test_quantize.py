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

Tensors = dict[str, torch.Tensor]
FAMILIES = ["qwen3_moe", "deepseek_v3"]


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
        [("qwen3_moe", (torch.bfloat16, torch.float16, torch.float32)), ("deepseek_v3", (torch.float32,))],
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

    @pytest.mark.parametrize("quant", [{"scales": "power_of_two"}, {"weights": "none"}, {"weights": "fp8_channel"}])
    async def test_whatever_the_service_makes_of_weights(self, models, tmp_path, stacked, quant):
        root, model = tmp_path / "log", models["qwen3_moe"]
        async with real_ingest(model, root, quant=quant) as service, RolloutClient(service.url) as client:
            by_service = await push(client, 1, moved(stacked, torch.bfloat16), quantize="service")
            assert (await push(client, 2, moved(stacked, torch.bfloat16))).digest == by_service.digest

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

    async def test_every_form_of_named_tensors_makes_the_same_version(self, moe_client, models):
        on_disk, module = load_file(models["qwen3_moe"] / "model.safetensors"), module_of(models["qwen3_moe"])
        table = [describe(name, tensor) for name, tensor in on_disk.items()]
        right = (await moe_client.weights(0)).digest
        for version, source in enumerate((module, list(module.named_parameters()), iter(on_disk.items())), start=1):
            assert (await push(moe_client, version, source)).digest == right
        clones = ((name, tensor.clone()) for name, tensor in on_disk.items())
        assert (await push(moe_client, 4, clones, tensor_table=table)).digest == right

    @pytest.mark.parametrize(
        ("transport", "quantize", "knows_table"),
        [
            ("http", "service", True),
            ("http", "trainer", False),
            ("shared_memory", "service", False),
            ("shared_memory", "trainer", True),
            ("delta", "trainer", True),
        ],
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

    async def test_only_a_quantizing_trainer_asks_for_the_recipe(self, service, client):
        service.recipe = TrainerRecipe(weights="fp8_block", quantized=("w",))
        for version, quantize, nbytes in ((1, "service", 4 * 256**2), (2, "trainer", 256**2 + 4 * 4)):
            await push(client, version, {"w": torch.ones(256, 256)}, quantize=quantize)
            assert service.calls("GET", "/v1/weights/recipe") == version - 1
            assert len(service.uploads[version].stream) == nbytes

    async def test_the_recipe_is_told_only_to_those_who_may_push(self, models, tmp_path):
        async with real_ingest(models["qwen3_moe"], tmp_path / "log", token="secret") as service:
            async with RolloutClient(service.url) as stranger:
                with pytest.raises(Unauthorized):
                    await push(stranger, 1, module_of(models["qwen3_moe"]))
            async with RolloutClient(service.url, token="secret") as client:
                assert (await push(client, 1, module_of(models["qwen3_moe"]))).state == "committed"


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
