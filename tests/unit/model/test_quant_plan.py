"""Which modules are quantized, and what cannot be."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import vllm.distributed
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    validate_fp8_block_shape,
    validate_fp8_block_shape_moe,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from rollout_service.config.engine import QuantConfig
from rollout_service.model.engine_layout import FUSED, Heads, table_layout
from rollout_service.model.quant_plan import QuantPlan, plan
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL

Linears = dict[str, tuple[int, int]]

LAYER = "model.layers.0."
LINEARS = {
    f"{LAYER}self_attn.q_proj": (512, 256),
    f"{LAYER}self_attn.k_proj": (256, 256),
    f"{LAYER}self_attn.v_proj": (256, 256),
    f"{LAYER}self_attn.o_proj": (256, 512),
    f"{LAYER}mlp.gate_proj": (768, 256),
    f"{LAYER}mlp.up_proj": (768, 256),
    f"{LAYER}mlp.down_proj": (256, 768),
}
KEEP = QuantConfig(indivisible="keep_bf16")


def moe(intermediate: int = 256, hidden: int = 256, experts: int = 3, layers: int = 2) -> Linears:
    shapes = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}": shape
        for layer in range(layers)
        for expert in range(experts)
        for leaf, shape in shapes.items()
    }


class TestSkipped:
    def test_without_skip_patterns_every_linear_module_is_quantized(self):
        assert plan(LINEARS, QuantConfig()) == QuantPlan(frozenset(f"{name}.weight" for name in LINEARS), ())
        assert plan({"odd": (3, 5)}, QuantConfig(weights="none")) == QuantPlan(frozenset())

    @pytest.mark.parametrize(
        ("linears", "patterns", "kept", "not_converted"),
        [
            (LINEARS, ("*.mlp.down_proj", "*.o_proj"), "mlp.down_proj self_attn.o_proj", None),
            (LINEARS, ("*.[qkv]_proj",), "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.qkv_proj"),
            (LINEARS, ("*.qkv_proj",), "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.qkv_proj"),
            ({"model.layers.0.o_proj": (130, 128)}, ("*.o_proj",), "o_proj", None),  # which does not divide
        ],
    )
    def test_skipped_modules_stay_in_bf16_and_vllm_is_told(self, linears, patterns, kept, not_converted):
        decided = plan(linears, QuantConfig(skip=patterns))
        names = {f"{LAYER}{name}" for name in kept.split()}
        assert decided.kept.keys() == names
        assert decided.quantized == {f"{name}.weight" for name in linears.keys() - names}
        told = set(decided.not_converted)
        assert told >= names and told - names == ({f"{LAYER}{not_converted}"} if not_converted else set())
        assert all(why.removeprefix("quant.skip ") in patterns for why in decided.kept.values())

    def test_a_module_is_kept_by_the_first_pattern_that_matches_it(self):
        decided = plan(LINEARS, QuantConfig(skip=("*.mlp.down_proj", "*.o_proj", "*.down_proj")))
        assert decided.kept == {
            f"{LAYER}mlp.down_proj": "quant.skip *.mlp.down_proj",
            f"{LAYER}self_attn.o_proj": "quant.skip *.o_proj",
        }

    def test_a_pattern_for_layer_1_does_not_match_layers_10_and_11(self):
        linears = {f"model.layers.{layer}.mlp.down_proj": (128, 128) for layer in (1, 10, 11)}
        assert plan(linears, QuantConfig(skip=("*.layers.1.*",))).not_converted == ("model.layers.1.mlp.down_proj",)

    @pytest.mark.parametrize("pattern", ["model.layers.1.*", "*.layers.1.mlp.experts", "*.layers.1.mlp.experts.*"])
    def test_the_experts_of_a_layer_are_skipped_as_a_whole(self, pattern):
        decided = plan(moe(), QuantConfig(skip=(pattern,)))
        assert decided.not_converted == ("model.layers.1.mlp.experts",)
        assert decided.quantized == {f"{name}.weight" for name in moe() if ".layers.0." in name}

    @pytest.mark.parametrize(
        ("linears", "pattern", "why"),
        [
            (LINEARS, "*.Down_Proj", r"\*\.Down_Proj matches no linear module; their names are like model\.layers"),
            (LINEARS, "*.q_proj", r"fuses into one layer; 2 modules .*\.k_proj, .*\.v_proj$"),
            (LINEARS, "*.up_proj", r"fuses into one layer; 1 modules .*\.gate_proj$"),
            (LINEARS, "*.layer.9.*", r"\*\.layer\.9\.\* matches no linear module; their names are like model\.layers"),
            (moe(), "*.down_proj", r"fuses into one layer.*layers\.\{0-1\}\.mlp\.experts\."),
            (moe(), "*.experts.1.*", r"fuses into one layer.*layers\.\{0-1\}\.mlp\.experts\."),
            (moe(), "model.layers.1.mlp.experts.[01].*", r"fuses into one layer.*layers\.1\.mlp\.experts\."),
        ],
    )
    def test_patterns_that_match_nothing_or_a_part_are_refused(self, linears, pattern, why):
        with pytest.raises(ValueError, match=why):
            plan(linears, QuantConfig(skip=(pattern,)))


MIXED = LINEARS | moe() | {f"{LAYER}self_attn.q_a_proj": (256, 256), f"{LAYER}self_attn.kv_a_proj_with_mqa": (192, 256)}
MIXED |= {f"model.layers.1.mlp.shared_experts.{x}_proj": (128, 128) for x in ("gate", "up", "down")}


class TestIndivisible:
    def test_every_indivisible_module_is_named_with_its_shard(self):
        linears = LINEARS | {f"{LAYER}mlp.down_proj": (256, 700), f"{LAYER}self_attn.o_proj": (200, 512)}
        with pytest.raises(ValueError, match=r"2 linear modules do not divide into 128×128 blocks") as refused:
            plan(linears, QuantConfig())
        message = str(refused.value)
        assert f"{LAYER}mlp.down_proj [256, 700]" in message and f"{LAYER}self_attn.o_proj [200, 512]" in message
        assert "up_proj" not in message and "quant.indivisible: keep_bf16" in message and "lower" not in message

    def test_channels_need_no_blocks_but_gpus_whole_rows_and_heads(self):
        linears = {"a.gate_proj": (130, 100), "a.up_proj": (130, 100)}
        for form in (FP8_CHANNEL, INT8_CHANNEL):
            config = QuantConfig(weights=form.name)
            planned = plan(linears, config, 2)
            assert planned.quantized == {"a.gate_proj.weight", "a.up_proj.weight"}
            assert planned.form is form and planned.not_converted == ()
            with pytest.raises(ValueError, match="130 rows or columns cannot be divided between 4 GPUs"):
                plan(linears, config, 4)

    def test_thousands_of_indivisible_experts_get_a_short_message(self):
        with pytest.raises(ValueError, match="18432 linear modules do not divide") as refused:
            plan(moe(768, 2048, experts=128, layers=48), QuantConfig(), tensor_parallel_size=8)
        message = str(refused.value)
        assert "model.layers.{0-47}.mlp.experts.{0-127}.up_proj [96, 2048]" in message
        assert "model.layers.{0-47}.mlp.experts.{0-127}.down_proj [2048, 96]" in message
        assert "set engine.expert_parallel: true" in message and "engine.tensor_parallel_size: 1 or 2;" in message
        assert len(message) < 600

    @pytest.mark.parametrize(
        ("linears", "ways", "expert_parallel", "ways_out"),
        [
            (moe(768), 4, False, "engine.expert_parallel: true, so that each GPU has whole experts; or "
             "engine.tensor_parallel_size: 1 or 2; or quant.indivisible: keep_bf16"),
            (moe(700), 4, True, "quant.indivisible: keep_bf16"),
            (moe(128) | {"mlp.up_proj": (384, 128)}, 2, False,
             "engine.tensor_parallel_size: 1; or quant.indivisible: keep_bf16"),
            (moe(128) | {"mlp.up_proj": (768, 128)}, 4, True,
             "engine.tensor_parallel_size: 1 or 2; or quant.indivisible: keep_bf16"),
        ],
        ids=["experts", "whole experts", "also others", "others alone"],
    )  # fmt: skip
    def test_a_refusal_says_what_would_divide(self, linears, ways, expert_parallel, ways_out):
        with pytest.raises(ValueError, match="do not divide") as refused:
            plan(linears, QuantConfig(), ways, expert_parallel=expert_parallel)
        assert f": set {ways_out}, which leaves them in BF16" in str(refused.value)

    def test_whole_experts_need_no_shards_that_divide(self):
        linears = LINEARS | moe(768)
        assert len(plan(linears, QuantConfig(), 2, expert_parallel=True).quantized) == len(linears)
        assert len(plan(moe(768), QuantConfig(), 8, expert_parallel=True).quantized) == len(moe())
        with pytest.raises(ValueError, match=r"mlp\.up_proj \[192, 256\].*set engine\.tensor_parallel_size: 1 or 2;"):
            plan(linears, QuantConfig(), 4, expert_parallel=True)

    def test_kv_heads_that_are_repeated_still_divide(self):
        heads = Heads(query=8, kv=2)
        linears = {f"a.{leaf}_proj": (rows, 128) for leaf, rows in (("q", 1024), ("k", 256), ("v", 256))}
        assert len(plan(linears, QuantConfig(), 8, heads).quantized) == 3
        with pytest.raises(ValueError, match=r"a\.k_proj \[32, 128\]"):
            plan(linears, QuantConfig(), 8)

    def test_an_indivisible_module_keeps_its_fused_layer_in_bf16(self):
        decided = plan(LINEARS, KEEP, 4, Heads(query=4, kv=4))
        attention = {f"{LAYER}self_attn.{x}_proj" for x in "qkv"}
        mlp = {f"{LAYER}mlp.{x}_proj" for x in ("gate", "up", "down")}
        assert decided.kept.keys() == attention | mlp
        assert decided.quantized == {f"{LAYER}self_attn.o_proj.weight"}
        assert "[64, 256]" in decided.kept[f"{LAYER}self_attn.k_proj"]
        assert "self_attn.k_proj" in decided.kept[f"{LAYER}self_attn.q_proj"]

    def test_indivisible_experts_are_kept_in_bf16_layer_by_layer(self):
        linears = moe(256) | {"model.layers.1.mlp.experts.2.down_proj": (256, 200)}
        decided = plan(linears, KEEP)
        assert decided.not_converted == ("model.layers.1.mlp.experts",)
        assert decided.quantized == {f"{name}.weight" for name in linears if ".layers.0." in name}
        assert "mlp.experts.*.down_proj" in decided.kept["model.layers.1.mlp.experts.0.gate_proj"]


SIZES = [64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1408]


@pytest.fixture(params=[1, 2, 4])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A number of GPUs, in which vLLM believes although none was started."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: request.param)
    return int(request.param)


def accepts(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def vllm_accepts(shape: tuple[int, int], cut: tuple[int, int], outputs: list[int], ways: int) -> bool:
    """vLLM's check of a linear layer ``shape`` of which a GPU holds ``cut``, made of parts with ``outputs`` rows."""
    layer = torch.nn.Module()
    layer.tp_size = ways
    return accepts(validate_fp8_block_shape, layer, shape[1], shape[0], cut[1], outputs, [BLOCK, BLOCK])


class TestAsInVllm:
    @given(st.sets(st.sampled_from([module.name for module in table_layout(MIXED).modules])), st.booleans())
    def test_vllm_leaves_in_bf16_exactly_what_the_plan_keeps(self, kept, mapped):
        decided = plan(MIXED, QuantConfig(skip=tuple(sorted(kept))))
        fused = {name: list(parts) for name, parts in FUSED.items()} if mapped else {}  # Qwen3-MoE may lack an entry
        for module in table_layout(MIXED).modules:
            assert is_layer_skipped(module.name, list(decided.not_converted), fused) is (module.name in kept), (
                module.name
            )
            assert {f"{part}.weight" in decided.quantized for part in module.names} == {module.name not in kept}

    def test_what_the_plan_accepts_is_accepted_by_vllm(self, ways):
        ours = {size: accepts(plan, moe(size), QuantConfig(), ways) for size in SIZES}
        vllms = {size: accepts(validate_fp8_block_shape_moe, size // ways, [BLOCK, BLOCK]) for size in SIZES}
        assert ours == vllms and set(ours.values()) == {True, False}
        for size in SIZES:
            linears = {"mlp.gate_proj": (size, 256), "mlp.up_proj": (size, 256)}
            theirs = vllm_accepts((2 * size, 256), (2 * size // ways, 256), [size // ways] * 2, ways)
            assert accepts(plan, linears, QuantConfig(), ways) is theirs, size
            theirs = vllm_accepts((256, size), (256, size // ways), [256], ways)
            of_rows = accepts(plan, {"mlp.down_proj": (256, size)}, QuantConfig(), ways)
            # alone on a GPU vLLM takes any size; here the rule is one for all
            assert of_rows <= theirs and (ways == 1 or of_rows is theirs), size

    def test_deepseek_s_fused_projections_are_accepted_as_in_vllm(self, ways):
        for query, latent in product(SIZES, SIZES):
            linears = {"a.q_a_proj": (query, 256), "a.kv_a_proj_with_mqa": (latent, 256)}
            theirs = vllm_accepts((query + latent, 256), (query + latent, 256), [query, latent], 1)
            assert accepts(plan, linears, QuantConfig(), ways) is theirs, (query, latent)
