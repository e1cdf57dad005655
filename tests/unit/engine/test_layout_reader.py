"""What vLLM's own models say of their modules: as the table says for the families in it, and right for others."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from rollout_service.config import QuantConfig
from rollout_service.model.engine_layout import EngineLayout, read_layout
from rollout_service.model.quant_plan import QuantPlan, plan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import UploadTensor
from tests.support import families, models

IN_TABLE = [family for family in models.FAMILIES if not family.endswith(("_tp", "_ep"))]
OTHERS = ["falcon", "gemma2", "gpt2", "gpt_oss", "granitemoe", "phi3"]
Read = dict[str, tuple[ServedModel, EngineLayout]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Each family's model and what vLLM makes of it; one process imports vllm for all of them."""
    place = tmp_path_factory.mktemp("layouts")
    paths = []
    for family in [*IN_TABLE, *OTHERS]:
        folder = place / family
        config = models.config_of(family) if family in IN_TABLE else families.config_of(family)
        config.save_pretrained(folder)
        paths += [str(folder), str(place / f"{family}.json")]
    run = subprocess.run([sys.executable, "-m", "rollout_service.engine.layout_reader", *paths], stderr=subprocess.PIPE)
    assert run.returncode == 0, [path for path in paths if path.endswith("json") and Path(path).exists()][-1]
    return {
        family: (
            ServedModel.load(place / family),
            EngineLayout.model_validate_json((place / f"{family}.json").read_bytes()),
        )
        for family in [*IN_TABLE, *OTHERS]
    }


@pytest.mark.parametrize("family", IN_TABLE)
def test_vllm_quantizes_fuses_and_cuts_as_the_table_says(read, family):
    model, layout = read[family]
    assert layout.linears(model.shapes) == model.linears and layout.not_loaded == ()
    of_table = {module.name: module.names for module in model.layout.modules}
    of_vllm = {module.name: module.names for module in layout.modules}
    assert {name: set(parts) for name, parts in of_vllm.items()} == {n: set(p) for n, p in of_table.items()}
    fused = [name for name in of_vllm if not name.endswith(".experts")]
    assert [of_vllm[name] for name in fused] == [of_table[name] for name in fused]
    for name, shape in model.linears.items():
        for ways, whole in product((1, 2, 4), (False, True)):
            expected = model.layout.shards(name, shape, ways, expert_parallel=whole)
            assert layout.shards(name, shape, ways, expert_parallel=whole) == expected, name
    planned = plan(layout.linears(model.shapes), QuantConfig(), 1, model.heads, layout=layout)
    assert planned.quantized == plan(model.linears, QuantConfig(), 1, model.heads).quantized
    assert {*planned.not_converted} <= model.routers


class TestOthers:
    def test_fused_on_disk_is_cut_by_section(self, read):
        model, layout = read["phi3"]
        name = "model.layers.0.self_attn.qkv_proj"
        assert layout.shards(name, (512, 256), 2) == ((128, 256), (64, 256), (64, 256))
        assert layout.shards(name, (512, 256), 4) == ((64, 256), (64, 256), (64, 256))
        planned = plan(layout.linears(model.shapes), QuantConfig(), 1, model.heads, layout=layout)
        assert f"{name}.weight" in planned.quantized
        with pytest.raises(ValueError, match=r"6 linear modules do not divide.*self_attn\.qkv_proj \[64, 256\]"):
            plan(layout.linears(model.shapes), QuantConfig(), 2, model.heads, layout=layout)

    def test_a_head_that_the_engine_has_no_place_for_is_named(self, read):
        model, layout = read["gemma2"]
        assert layout.not_loaded == ("lm_head.weight",)
        table = [UploadTensor(name=n, dtype="bfloat16", shape=shape) for n, shape in model.shapes.items()]
        assert model.ignored.pattern_of("lm_head.weight") == r"^lm_head\.weight$"
        model.check_table(table, QuantPlan(frozenset()))  # which a trainer's state dict has

    def test_what_is_transposed_as_it_loads_stays_in_bf16(self, read):
        _, layout = read["gpt2"]
        assert layout.modules == ()
        assert layout.kept["transformer.h.0.mlp.c_fc"] == "vLLM rearranges it as it loads"
        assert "transformer.h.0.mlp.c_fc" in layout.not_converted

    def test_what_is_copied_as_it_loads_stays_in_bf16(self, read):
        for family, module in [
            ("falcon", "transformer.h.1.self_attention.query_key_value"),
            ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
        ]:
            assert read[family][1].kept[module] == "vLLM rearranges it as it loads"

    def test_experts_that_are_stacked_on_disk_stay_in_bf16(self, read):
        model, layout = read["granitemoe"]
        block = "model.layers.0.block_sparse_moe"
        assert f"{block}.input_linear.weight" in model.shapes
        assert layout.kept[f"{block}.input_linear"] == "vLLM rearranges it as it loads"
        assert f"{block}.experts" in layout.not_converted
        assert f"{block}.router.layer" not in layout.linears(model.shapes)
        assert "model.layers.0.self_attn.q_proj" in layout.linears(model.shapes)


@pytest.mark.slow  # vLLM traces what it builds with transformers' code, which takes as long as all the others here
def test_a_router_under_another_name_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    families.config_of("phimoe", {"num_hidden_layers": 1}).save_pretrained(tmp_path / "phimoe")
    model, layout = ServedModel.load(tmp_path / "phimoe"), read_layout(tmp_path / "phimoe")
    assert layout.kept["model.layers.0.block_sparse_moe.gate"] == "router"
    assert layout.not_converted == ("model.layers.0.mlp.router",)
    assert "model.layers.0.block_sparse_moe.experts.7.w2" in layout.linears(model.shapes)


@pytest.mark.slow  # vLLM is imported twice more
def test_an_answer_is_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    families.config_of("phi3").save_pretrained(folder)
    first = read_layout(folder)
    assert first.source.endswith("Phi3ForCausalLM")
    [kept] = (tmp_path / "cache" / "rollout-service").rglob("*.json")
    kept.write_text(first.model_copy(update={"source": "the file"}).model_dump_json())
    assert read_layout(folder) == first.model_copy(update={"source": "the file"})

    # another model has an answer of its own
    (folder / "config.json").write_text('{"model_type": "phi3", "architectures": ["NoSuchModel"]}')
    with pytest.raises(ValueError, match=r"vLLM .* cannot build model: .*NoSuchModel"):
        read_layout(folder)
