"""Which modules are quantized, and what cannot be."""

import pytest

from rollout_service.config import QuantConfig
from rollout_service.quant.recipe import QuantPlan, plan

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


def test_every_linear_module_is_quantized_when_nothing_is_skipped() -> None:
    assert plan(LINEARS, QuantConfig()) == QuantPlan(frozenset(f"{name}.weight" for name in LINEARS), ())


def test_nothing_is_quantized_in_bf16_and_no_shape_is_refused() -> None:
    assert plan({"odd": (3, 5)}, QuantConfig(weights="none")) == QuantPlan(frozenset(), ())


def test_skipped_modules_stay_in_bf16_and_vllm_is_told() -> None:
    decided = plan(LINEARS, QuantConfig(skip=("*.mlp.down_proj", "*.o_proj")))
    assert decided.not_converted == (f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.o_proj")
    assert f"{LAYER}mlp.down_proj.weight" not in decided.quantized
    assert len(decided.quantized) == len(LINEARS) - 2


def test_a_pattern_names_a_layer_and_no_other_that_begins_like_it() -> None:
    linears = {f"model.layers.{layer}.mlp.down_proj": (128, 128) for layer in (1, 10, 11)}
    assert plan(linears, QuantConfig(skip=("*.layers.1.*",))).not_converted == ("model.layers.1.mlp.down_proj",)


def test_patterns_tell_upper_from_lower_case() -> None:
    with pytest.raises(ValueError, match=r"\*\.Down_Proj matches no linear module"):
        plan(LINEARS, QuantConfig(skip=("*.Down_Proj",)))


def test_a_pattern_that_matches_nothing_is_refused_instead_of_ignored() -> None:
    with pytest.raises(
        ValueError, match=r"\*\.layer\.9\.\* matches no linear module; their names are like model\.layers"
    ):
        plan(LINEARS, QuantConfig(skip=("*.down_proj", "*.layer.9.*")))


@pytest.mark.parametrize(
    ("pattern", "torn"),
    [("*.q_proj", ["k_proj", "v_proj"]), ("*.up_proj", ["gate_proj"])],
)
def test_a_part_of_a_fused_layer_is_not_skipped_without_the_rest(pattern: str, torn: list[str]) -> None:
    with pytest.raises(ValueError, match="fuses into one layer") as refused:
        plan(LINEARS, QuantConfig(skip=(pattern,)))
    assert all(f".{name}" in str(refused.value) for name in torn)
    assert "down_proj" not in str(refused.value)


def test_a_fused_layer_is_skipped_as_a_whole() -> None:
    decided = plan(LINEARS, QuantConfig(skip=("*.[qkv]_proj",)))
    assert decided.not_converted == tuple(f"{LAYER}self_attn.{x}_proj" for x in "kqv")


def test_every_module_that_does_not_divide_is_named_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"2 linear modules do not divide into 128×128 blocks") as refused:
        plan({"a.fc1": (130, 128), "a.fc2": (128, 192), "a.fc3": (128, 128)}, QuantConfig())
    assert "a.fc1 [130, 128]" in str(refused.value) and "a.fc2 [128, 192]" in str(refused.value)
    assert "fc3" not in str(refused.value)


def test_a_module_that_does_not_divide_may_be_skipped() -> None:
    assert plan({"a.fc1": (130, 128)}, QuantConfig(skip=("a.fc1",))).not_converted == ("a.fc1",)


def test_tensor_parallelism_cuts_the_output_of_most_modules() -> None:
    linears = {"mlp.up_proj": (256, 128)}
    assert plan(linears, QuantConfig(), tensor_parallel_size=2).quantized == {"mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4: mlp\.up_proj \[256, 128\]"):
        plan(linears, QuantConfig(), tensor_parallel_size=4)


@pytest.mark.parametrize("leaf", ["o_proj", "down_proj"])
def test_tensor_parallelism_cuts_the_input_of_row_parallel_modules(leaf: str) -> None:
    linears = {f"x.{leaf}": (128, 256)}
    assert plan(linears, QuantConfig(), tensor_parallel_size=2).quantized == {f"x.{leaf}.weight"}
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=4: x\.{leaf} \[128, 256\]"):
        plan(linears, QuantConfig(), tensor_parallel_size=4)
