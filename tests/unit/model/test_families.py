"""What is known of vLLM's modules is what vLLM itself says."""

import pytest

from rollout_service.model.families import (
    CUTS,
    EngineModule,
    Heads,
    engine_modules,
    require_whole_heads,
    shard_shape,
)

ATTENTION = "model.layers.0.self_attn."


OUTPUT_CUT, INPUT_CUT, UNCUT = (128, 256), (512, 64), (512, 256)


class TestFused:
    def test_modules_that_vllm_fuses_become_one_in_its_order(self):
        names = [f"{ATTENTION}{leaf}" for leaf in ("v_proj", "o_proj", "q_proj", "k_proj")]
        assert engine_modules(names) == [
            EngineModule(f"{ATTENTION}qkv_proj", tuple(f"{ATTENTION}{x}_proj" for x in "qkv")),
            EngineModule(f"{ATTENTION}o_proj", (f"{ATTENTION}o_proj",)),
        ]

    def test_routed_experts_are_one_module_and_shared_ones_another(self):
        mlp = "model.layers.3.mlp."
        routed = [f"{mlp}experts.{expert}.{leaf}" for expert in (0, 11) for leaf in ("up_proj", "down_proj")]
        shared = [f"{mlp}shared_experts.gate_proj", f"{mlp}shared_experts.up_proj"]
        modules = engine_modules([*routed, *shared])
        assert modules == [
            EngineModule(f"{mlp}experts", tuple(routed)),
            EngineModule(f"{mlp}shared_experts.gate_up_proj", tuple(shared)),
        ]
        assert [module.holds_experts for module in modules] == [True, False]

    def test_deepseek_without_a_low_rank_query_fuses_no_attention(self):
        names = [f"{ATTENTION}{leaf}" for leaf in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
        assert engine_modules(names) == [EngineModule(name, (name,)) for name in names]


class TestTensorParallel:
    @pytest.mark.parametrize(
        ("leaves", "shard"),
        [
            ("q_proj k_proj v_proj gate_proj up_proj w1 w3 q_b_proj kv_b_proj", OUTPUT_CUT),
            ("o_proj down_proj w2", INPUT_CUT),
            ("q_a_proj kv_a_proj_with_mqa", UNCUT),
        ],
    )
    def test_tensor_parallelism_cuts_outputs_or_inputs_or_nothing(self, leaves, shard):
        assert {leaf: shard_shape(f"x.{leaf}", (512, 256), 4) for leaf in leaves.split()} == dict.fromkeys(
            leaves.split(), shard
        )

    def test_expert_parallelism_leaves_routed_experts_whole(self):
        cut = {
            name: shard_shape(f"model.layers.0.mlp.{name}", (768, 2048), 4, expert_parallel=True)
            for name in ("experts.7.up_proj", "shared_experts.up_proj", "up_proj")
        }
        assert cut == {"experts.7.up_proj": (768, 2048), "shared_experts.up_proj": (192, 2048), "up_proj": (192, 2048)}

    def test_what_cannot_be_divided_evenly_is_named(self):
        with pytest.raises(ValueError, match=r"x\.down_proj: its dimension of 256 cannot be divided between 3 GPUs"):
            shard_shape("x.down_proj", (512, 256), 3)

    def test_a_module_of_an_unknown_kind_is_refused_and_not_guessed(self):
        assert "c_attn" not in CUTS
        with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn: it is not known how vLLM divides"):
            shard_shape("h.0.attn.c_attn", (512, 256), 1)

    @pytest.mark.parametrize(("query", "kv", "ways"), [(16, 4, 3), (14, 2, 4), (12, 3, 2), (24, 4, 6)])
    def test_gpus_that_cannot_have_whole_heads_each_are_refused(self, query, kv, ways):
        with pytest.raises(ValueError, match=rf"tensor_parallel_size={ways} cannot share out {query} attention heads"):
            require_whole_heads(Heads(query, kv), ways)

    @pytest.mark.parametrize(("query", "kv", "ways"), [(16, 4, 1), (16, 4, 4), (16, 4, 8), (14, 2, 2), (32, 4, 16)])
    def test_gpus_that_can_have_whole_heads_get_them(self, query, kv, ways):
        heads, width = Heads(query, kv), 128
        require_whole_heads(heads, ways)
        assert shard_shape("q_proj", (query * width, 256), ways, heads) == (query // ways * width, 256)
        assert shard_shape("k_proj", (kv * width, 256), ways, heads) == (max(kv // ways, 1) * width, 256)
