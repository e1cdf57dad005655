"""What is known of vLLM's modules is what vLLM itself says."""

import resource

import pytest

from rollout_service.model import engine_layout as module
from rollout_service.model.engine_layout import Heads, Shape, require_whole_heads, table_layout

ATTENTION = "model.layers.0.self_attn."


OUTPUT_CUT, INPUT_CUT, UNCUT = (128, 256), (512, 64), (512, 256)


def fused(*names: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(module.name, module.names) for module in table_layout(dict.fromkeys(names, (256, 256))).modules]


def shard(name: str, shape: Shape, ways: int, heads: Heads | None = None, *, expert_parallel: bool = False) -> Shape:
    [found] = table_layout({name: shape}, heads).shards(name, shape, ways, expert_parallel=expert_parallel)
    return found


class TestFused:
    def test_modules_that_vllm_fuses_become_one_in_its_order(self):
        assert fused(*(f"{ATTENTION}{leaf}" for leaf in ("v_proj", "o_proj", "q_proj", "k_proj"))) == [
            (f"{ATTENTION}qkv_proj", tuple(f"{ATTENTION}{x}_proj" for x in "qkv")),
            (f"{ATTENTION}o_proj", (f"{ATTENTION}o_proj",)),
        ]

    def test_routed_experts_are_one_module_and_shared_ones_another(self):
        mlp = "model.layers.3.mlp."
        routed = tuple(f"{mlp}experts.{expert}.{leaf}" for expert in (0, 11) for leaf in ("up_proj", "down_proj"))
        shared = f"{mlp}shared_experts.gate_proj", f"{mlp}shared_experts.up_proj"
        assert fused(*routed, *shared) == [(f"{mlp}experts", routed), (f"{mlp}shared_experts.gate_up_proj", shared)]

    def test_deepseek_without_a_low_rank_query_fuses_no_attention(self):
        names = [f"{ATTENTION}{leaf}" for leaf in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
        assert fused(*names) == [(name, (name,)) for name in names]


class TestTensorParallel:
    @pytest.mark.parametrize(
        ("leaves", "cut"),
        [
            ("q_proj k_proj v_proj gate_proj up_proj w1 w3 q_b_proj kv_b_proj", OUTPUT_CUT),
            ("o_proj down_proj w2", INPUT_CUT),
            ("q_a_proj kv_a_proj_with_mqa", UNCUT),
        ],
    )
    def test_tensor_parallelism_cuts_outputs_or_inputs_or_nothing(self, leaves, cut):
        assert {leaf: shard(f"x.{leaf}", (512, 256), 4) for leaf in leaves.split()} == dict.fromkeys(
            leaves.split(), cut
        )

    def test_expert_parallelism_leaves_routed_experts_whole(self):
        cut = {
            name: shard(f"model.layers.0.mlp.{name}", (768, 2048), 4, expert_parallel=True)
            for name in ("experts.7.up_proj", "shared_experts.up_proj", "up_proj")
        }
        assert cut == {"experts.7.up_proj": (768, 2048), "shared_experts.up_proj": (192, 2048), "up_proj": (192, 2048)}

    def test_what_cannot_be_cut_is_named_and_not_guessed(self):
        with pytest.raises(ValueError, match=r"x\.down_proj: 256 rows or columns cannot be divided between 3 GPUs"):
            shard("x.down_proj", (512, 256), 3)
        with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn: it is not known how vLLM divides"):
            shard("h.0.attn.c_attn", (512, 256), 1)

    @pytest.mark.parametrize(("query", "kv", "ways"), [(16, 4, 3), (14, 2, 4), (12, 3, 2), (24, 4, 6)])
    def test_gpus_that_cannot_have_whole_heads_each_are_refused(self, query, kv, ways):
        with pytest.raises(ValueError, match=rf"tensor_parallel_size={ways} cannot share out {query} attention heads"):
            require_whole_heads(Heads(query, kv), ways)

    @pytest.mark.parametrize(("query", "kv", "ways"), [(16, 4, 1), (16, 4, 4), (16, 4, 8), (14, 2, 2), (32, 4, 16)])
    def test_gpus_that_can_have_whole_heads_get_them(self, query, kv, ways):
        heads, width = Heads(query, kv), 128
        require_whole_heads(heads, ways)
        assert shard("q_proj", (query * width, 256), ways, heads) == (query // ways * width, 256)
        assert shard("k_proj", (kv * width, 256), ways, heads) == (max(kv // ways, 1) * width, 256)


def test_a_full_disk_keeps_nothing_of_a_layout(tmp_path, caplog):
    place, layout = tmp_path / "layouts" / "1.json", table_layout({"q_proj": (128, 128)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        module._keep(layout, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(place.parent.iterdir())
    module._keep(layout, place)
    assert module.EngineLayout.model_validate_json(place.read_bytes()) == layout
    assert list(place.parent.iterdir()) == [place]
