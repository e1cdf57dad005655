"""A trainer's model in FP8 computes what the engines compute, and its gradients pass straight through."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import Kernels, TrainerRecipe
from rollout_service.quant.blockwise import dequantize_blockwise, quantize_blockwise
from rollout_service.quant.fake_quant import fake_quant, through_groups
from rollout_service.store.log import WeightLog
from tests.support.models import make_model
from tests.support.reference import reference_model
from tests.unit.ingest.trainer import config_of

TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
LINEAR = TrainerRecipe(weights="fp8_block", quantized=("weight",))


async def recipe_of(folder: Path, log: Path, **quant: object) -> TrainerRecipe:
    """Of a service of that model; its version 0 is in ``log``."""
    ingest = Ingest(config_of(folder, log, quant=quant))
    await ingest.start()
    try:
        return await ingest.recipe()
    finally:
        await ingest.stop()


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


def through_blocks(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_blockwise(*quantize_blockwise(weight.detach()))


class TestForward:
    @pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
    async def test_logits_are_those_of_the_version_in_fp8(self, tmp_path, family):
        folder = make_model(tmp_path / "model", family)
        recipe = await recipe_of(folder, tmp_path / "log")
        expected = reference_model(folder, WeightLog(tmp_path / "log").folder(0), fp8_activations=True, fp8_kv=False)
        trainer = loaded(folder)
        in_bf16, in_fp8 = logits(trainer), logits(expected)
        with fake_quant(trainer, recipe):
            differences = (logits(trainer) - in_fp8).abs()
        # sums of another order end in another last bit, and now and then in another code of what comes after
        assert differences.median() < 1e-5
        assert differences.mean() < 0.1 * (in_bf16 - in_fp8).abs().mean()
        assert torch.equal(logits(trainer), in_bf16)

    async def test_what_the_service_keeps_in_bf16_stays_so(self, tmp_path):
        folder = make_model(tmp_path / "model", "qwen3")
        recipe = await recipe_of(folder, tmp_path / "log", skip=("*.layers.0.*",))
        trainer = loaded(folder)
        with fake_quant(trainer, recipe) as quantized:
            names = {name for name, module in trainer.named_modules() if module in quantized.layers}
        assert names and all(name.startswith("model.layers.1.") for name in names)

    def test_the_result_has_the_dtype_of_autocast(self):
        layer = nn.Linear(128, 128, bias=True)
        with fake_quant(layer, LINEAR):
            assert layer(torch.ones(2, 128)).dtype == torch.float32
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert layer(torch.ones(2, 128)).dtype == torch.bfloat16


class TestRoundings:
    async def test_a_known_model_rounds_as_the_engines_do_unless_told_otherwise(self, tmp_path):
        folder = make_model(tmp_path / "model", "qwen3")
        recipe = await recipe_of(folder, tmp_path / "log")
        trainer = loaded(folder, torch.bfloat16)
        before = logits(trainer)
        with fake_quant(trainer, recipe, roundings=False):
            own = logits(trainer)
        with fake_quant(trainer, recipe):
            as_engine = logits(trainer)
        assert not torch.equal(as_engine, own)
        assert torch.equal(logits(trainer), before)

    async def test_experts_round_where_vllm_does_on_a_gpu(self, tmp_path):
        folder = make_model(tmp_path / "model", "qwen3_moe")
        recipe = await recipe_of(folder, tmp_path / "log")
        model = loaded(folder, torch.bfloat16)
        experts = model.get_submodule("model.layers.0.mlp.experts")
        torch.manual_seed(0)
        hidden = torch.randn(9, experts.gate_up_proj.shape[2]).bfloat16()
        hidden[4] *= 3e-2  # little enough for the least scale
        chosen = torch.stack([torch.randperm(len(experts.gate_up_proj))[:2] for _ in hidden])
        shares = torch.rand(chosen.shape)
        with torch.no_grad(), fake_quant(model, recipe, kernels="cuda_eager", products="fp32"):
            found = experts(hidden, chosen, shares)
        for token in range(len(hidden)):
            total = torch.zeros(hidden.shape[1])
            for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
                gate_up, down = (
                    through_blocks(experts.get_parameter(n)[expert]) for n in ("gate_up_proj", "down_proj")
                )
                gate, up = (through_groups(hidden[token]) @ gate_up.T).bfloat16().float().chunk(2)
                groups = (gate * torch.sigmoid(gate) * up).unflatten(0, (-1, 128))
                scales = (groups.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
                gated = ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten()
                total += ((gated @ down.T) * share).bfloat16().float()
            torch.testing.assert_close(found[token], total.bfloat16(), rtol=2**-8, atol=0)
        assert (found[4] != 0).any()

    def test_an_unknown_model_keeps_its_own_and_a_warning_says_so(self, caplog):
        with fake_quant(nn.Linear(128, 128), LINEAR) as quantized:
            assert quantized.roundings is None
        assert "Linear holds no transformers model" in caplog.text


class TestKernels:
    def test_the_recipes_kernels_are_imitated(self, tmp_path):
        model = loaded(make_model(tmp_path, "llama"), torch.bfloat16)
        recipe = TrainerRecipe(weights="fp8_block", quantized=("model.layers.0.mlp.down_proj.weight",))
        kernels: tuple[Kernels, ...] = ("cpu", "cuda_eager", "cuda_compiled")
        found = []
        for each in kernels:
            with fake_quant(model, recipe.model_copy(update={"kernels": each})):
                found.append(logits(model))
            with fake_quant(model, recipe, kernels=each):
                assert torch.equal(logits(model), found[-1])
        assert not any(torch.equal(found[i], found[i - 1]) for i in range(3))


class TestBackward:
    def test_gradients_pass_straight_through(self):
        torch.manual_seed(0)
        layer, hidden = nn.Linear(256, 128), torch.randn(2, 5, 256, requires_grad=True)
        rounded = nn.Linear(256, 128)
        rounded.weight.data, rounded.bias.data = through_blocks(layer.weight), layer.bias.detach().clone()
        inputs = through_groups(hidden.detach()).requires_grad_()
        coefficients = torch.randn(2, 5, 128)
        with fake_quant(layer, LINEAR):
            (layer(hidden) * coefficients).sum().backward()
        (rounded(inputs) * coefficients).sum().backward()
        for found, expected in (
            (hidden.grad, inputs.grad),
            (layer.weight.grad, rounded.weight.grad),
            (layer.bias.grad, rounded.bias.grad),
        ):
            torch.testing.assert_close(found, expected)
        layer.zero_grad()
        with fake_quant(layer.requires_grad_(False), LINEAR):
            layer(hidden).sum().backward()
        assert layer.weight.grad is None

    async def test_every_weight_of_a_mixture_learns(self, tmp_path):
        folder = make_model(tmp_path / "model", "qwen3_moe")
        recipe = await recipe_of(folder, tmp_path / "log")
        trainer, plain = loaded(folder), loaded(folder)
        with fake_quant(trainer, recipe):
            trainer(TOKENS, labels=TOKENS).loss.backward()
        plain(TOKENS, labels=TOKENS).loss.backward()
        for (name, parameter), other in zip(trainer.named_parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), name
            if parameter.grad is not None and other.grad is not None and other.grad.any():
                angle = torch.cosine_similarity(parameter.grad.flatten(), other.grad.flatten(), dim=0)
                assert angle > 0.8, (name, angle)


class TestRefused:
    @pytest.mark.parametrize(
        ("layer", "recipe", "why"),
        [
            (nn.Linear(128, 128), {"weights": "none"}, "quantizes nothing"),
            (nn.Linear(128, 128), {"weights": "int8_channel"}, "quantizes to int8_channel, and fake_quant supports"),
            (nn.Linear(128, 128), {"quantized": ("weight", "b.weight", "a.weight")},
             r"quantizes 2 weights that this model has not, such as a\.weight"),
            (nn.Conv1d(4, 4, 3), {}, "is a Conv1d with weight in FP8"),
            (nn.Linear(128, 128), {"kv_cache": "fp8_e4m3"}, r"KV cache is FP8, .* set kv_cache\.dtype: bfloat16"),
        ],
    )  # fmt: skip
    def test_what_no_engine_computes(self, layer, recipe, why):
        with pytest.raises(ValueError, match=why):
            fake_quant(layer, LINEAR.model_copy(update=recipe))

    def test_products_in_fp8_without_a_gpu_that_has_it(self):
        with pytest.raises(ValueError, match="in fp8, but the model is on cpu, which cannot: give fp32 or bf16"):
            fake_quant(nn.Linear(128, 128), LINEAR, products="fp8")

    async def test_a_part_of_stacked_experts(self, tmp_path):
        folder = make_model(tmp_path / "model", "qwen3_moe")
        recipe = await recipe_of(folder, tmp_path / "log")
        lost = recipe.model_copy(update={"quantized": tuple(n for n in recipe.quantized if ".experts.3.down" not in n)})
        model = loaded(folder)
        with pytest.raises(ValueError, match=r"experts\.down_proj: the service quantizes 7 of its 8 matrices"):
            fake_quant(model, lost)
        assert not any("forward" in vars(module) for module in model.modules())


def test_wrapped_models_are_known_by_their_own_names():
    wrapped = nn.Sequential()
    wrapped.add_module("_orig_mod", nn.Linear(128, 128))
    with fake_quant(wrapped, LINEAR) as quantized:
        assert quantized.layers == (wrapped.get_submodule("_orig_mod"),)
