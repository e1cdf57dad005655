"""What a version must bring, worked out from config.json alone."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Qwen3ForCausalLM,
)

from rollout_service.config.engine import QuantConfig
from rollout_service.errors import InvalidManifest
from rollout_service.model.engine_layout import Heads
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.experts import pieces
from rollout_service.protocol.ignored import IgnoredTensors
from rollout_service.protocol.upload import UploadTensor
from tests.support.families import MULTIMODAL, make_family
from tests.support.families import config_of as family_config
from tests.support.models import (
    EMBEDDING,
    FAMILIES,
    LM_HEAD,
    NUM_EXPERTS,
    OF_EACH_CLASS,
    config_of,
    make_model,
    stored_shapes,
)

OfFamily = Callable[[str], ServedModel]
BF16 = QuantPlan(frozenset())
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def served(tiny_model: Path) -> ServedModel:
    return ServedModel.load(tiny_model)


def table_of(model: ServedModel) -> dict[str, UploadTensor]:
    return {n: UploadTensor(name=n, dtype="bfloat16", shape=shape) for n, shape in model.shapes.items()}


def refusal(model: ServedModel, table: Iterable[UploadTensor], plan: QuantPlan) -> dict[str, list[str]]:
    """What is wrong with ``table``."""
    with pytest.raises(InvalidManifest) as refused:
        model.check_table(table, plan)
    return refused.value.detail


class TestShapes:
    def test_names_and_shapes_are_those_of_the_trainers_state_dict(self, served, tiny_model):
        trained = Qwen3ForCausalLM.from_pretrained(tiny_model)
        assert served.shapes == {name: tuple(tensor.shape) for name, tensor in trained.state_dict().items()}

    def test_facts_that_the_gateway_needs(self, served, model):
        assert served.vocab_size == 128 and not served.tied
        assert served.has_tokenizer
        assert not ServedModel.load(model).has_tokenizer


class TestTable:
    def test_order_and_dtype_are_free_but_every_tensor_is_required(self, served):
        table = [t.model_copy(update={"dtype": "float32"}) for t in reversed(table_of(served).values())]
        served.check_table(table, BF16)
        for left_out in table:
            assert refusal(served, [t for t in table if t is not left_out], BF16) == {"missing": [left_out.name]}

    def test_every_difference_is_reported_at_once(self, served):
        table = table_of(served)
        del table["model.norm.weight"], table["model.layers.0.mlp.up_proj.weight"]
        name = "model.layers.1.mlp.up_proj.weight"
        table[name] = table[name].model_copy(update={"shape": (256, 768)})
        stranger = UploadTensor(name="model.stranger", dtype="bfloat16", shape=(1,))
        with pytest.raises(InvalidManifest, match="does not fit the served model tiny-qwen3") as refused:
            served.check_table([*table.values(), stranger, table[EMBEDDING], table[EMBEDDING]], BF16)
        assert refused.value.detail == {
            "duplicate": [EMBEDDING],
            "unknown": ["model.stranger"],
            "missing": ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
            "wrong_shape": [f"{name} is [256, 768], the model's is [768, 256]"],
        }
        for what in ("1 duplicate", "1 unknown", "2 missing", "1 wrong_shape", "without the prefixes of wrappers"):
            assert what in refused.value.message

    def test_the_output_head_is_optional_where_the_embedding_is_tied(self, tied_model, served):
        tied = ServedModel.load(tied_model)
        table = table_of(tied)
        tied.check_table(table.values(), BF16)
        del table[LM_HEAD]
        tied.check_table(table.values(), BF16)
        with pytest.raises(InvalidManifest, match=f"1 missing: {LM_HEAD}"):
            served.check_table([t for t in table_of(served).values() if t.name != LM_HEAD], BF16)


class TestLoading:
    def test_the_fingerprint_tells_models_apart_and_not_folders(self, model, tied_model, tiny_model, tmp_path):
        (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
        assert ServedModel.load(tmp_path).fingerprint == ServedModel.load(tiny_model).fingerprint
        fingerprints = {ServedModel.load(path).fingerprint for path in (tiny_model, model, tied_model)}
        assert len(fingerprints) == 3

    @pytest.mark.parametrize(("family", "tied"), [("blip-2", True), ("mllama", False)])
    def test_a_config_need_not_say_whether_the_head_is_tied(self, tmp_path, family, tied):
        config = CONFIG_MAPPING[family](text_config={"num_hidden_layers": 1})
        assert not hasattr(config, "tie_word_embeddings")
        config.save_pretrained(tmp_path)
        assert ServedModel.load(tmp_path).tied == tied


@pytest.fixture
def moe(moe_model: Path) -> ServedModel:
    return ServedModel.load(moe_model)


@pytest.fixture(scope="module")
def of_family(tmp_path_factory: pytest.TempPathFactory) -> OfFamily:
    """Return a family's model by its config.json alone."""

    @cache
    def load(family: str) -> ServedModel:
        folder = tmp_path_factory.mktemp(family)
        FAMILIES[family]().save_pretrained(folder)
        return ServedModel.load(folder)

    return load


class TestFamilies:
    @pytest.mark.parametrize("family", OF_EACH_CLASS)
    def test_shapes_are_what_transformers_saves(self, family, tmp_path):
        model = ServedModel.load(make_model(tmp_path, family))
        stored = stored_shapes(tmp_path)
        assert model.shapes == stored | ({LM_HEAD: stored[EMBEDDING]} if model.tied else {})
        assert model.tied is (LM_HEAD not in stored)

    @pytest.mark.parametrize("family", MULTIMODAL)
    def test_shapes_of_a_multimodal_model_are_what_transformers_saves(self, family, tmp_path):
        model = ServedModel.load(make_family(tmp_path / family, family))
        stored = stored_shapes(tmp_path / family)
        assert model.shapes == stored | ({model.head: stored[model.embedding]} if model.tied else {})
        assert model.is_multimodal and model.attention == ()
        assert (model.vocab_size, model.heads) == (128, Heads(query=4, kv=2))

    def test_shapes_of_deepseek_v2_are_what_transformers_saves(self, tmp_path):
        config = FAMILIES["deepseek_v3"]().to_dict()
        for query in (None, 128):
            v2 = DeepseekV2Config(**{**config, "model_type": "deepseek_v2", "q_lora_rank": query})
            AutoModelForCausalLM.from_config(v2, dtype=torch.bfloat16).save_pretrained(tmp_path)
            model = ServedModel.load(tmp_path)
            assert model.config.model_type == "deepseek_v2" and model.shapes == stored_shapes(tmp_path)
            assert ("model.layers.1.self_attn.q_a_proj" in model.linears) is (query is not None)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_only_projections_are_quantized_and_all_of_them_are(self, family, of_family):
        model = of_family(family)
        matrices = {name.removesuffix(".weight") for name, shape in model.shapes.items() if len(shape) == 2}
        never = {
            name for name in matrices if name.endswith(("lm_head", "embed_tokens", ".gate", ".shared_expert_gate"))
        }
        assert model.linears.keys() == matrices - never
        assert all(model.shapes[f"{name}.weight"] == shape for name, shape in model.linears.items())
        assert model.plan(QuantConfig()).quantized == {f"{name}.weight" for name in model.linears}
        attention = tuple(f"model.layers.{layer}.self_attn" for layer in range(2))
        assert model.attention == (() if family == "deepseek_v3" else attention)

    def test_the_routers_are_those_of_the_layers_with_experts(self, of_family):
        blocks = {
            "qwen3": set(),
            "qwen2_moe": {"mlp.gate", "mlp.shared_expert_gate"},
            "mixtral": {"block_sparse_moe.gate"},
        }
        for family, leaves in blocks.items():
            assert of_family(family).routers == {
                f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in leaves
            }
        assert of_family("deepseek_v3").routers == {"model.layers.1.mlp.gate"}  # its first layer is dense

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_layer_s_tensors_lie_together_and_so_do_an_expert_s(self, family, of_family):
        names = list(of_family(family).shapes)
        for depth in ("layers", "experts"):
            groups = [name.partition(f".{depth}.")[0::2] for name in names if f".{depth}." in name]
            order = [(before, after.partition(".")[0]) for before, after in groups]
            assert [b for a, b in zip([None, *order], order, strict=False) if a != b] == list(dict.fromkeys(order))

    def test_a_tensor_that_bf16_is_too_coarse_for_is_named(self, of_family):
        assert of_family("deepseek_v3").keep_float32 == {"model.layers.1.mlp.gate.e_score_correction_bias"}
        assert of_family("qwen3_moe").keep_float32 == frozenset()

    @pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3"])
    def test_a_mixture_of_experts_state_dict_is_accepted_as_it_is(self, family, of_family):
        with torch.device("meta"):
            held = AutoModelForCausalLM.from_config(FAMILIES[family]()).state_dict()
        assert any(tensor.dim() == 3 for tensor in held.values())
        model = of_family(family)
        table = [UploadTensor(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in held.items()]
        plan = model.plan(QuantConfig())
        model.check_table(table, plan)
        for stacked in (tensor for tensor in table if len(tensor.shape) == 3):
            matrices = [piece.name for piece in pieces(stacked.name, stacked.shape, model.experts)]
            assert len(matrices) == NUM_EXPERTS * (2 if "gate_up" in stacked.name else 1)
            assert refusal(model, [t for t in table if t is not stacked], plan) == {"missing": sorted(matrices)}

    def test_the_plan_knows_how_many_kv_heads_there_are(self, tmp_path):
        config = FAMILIES["qwen3"]()
        config.head_dim, config.num_attention_heads, config.num_key_value_heads = 128, 8, 2
        config.intermediate_size = 1024
        config.save_pretrained(tmp_path)
        model = ServedModel.load(tmp_path)
        assert len(model.plan(QuantConfig(), 8).quantized) == len(model.linears)
        with pytest.raises(ValueError, match="cannot share out 8 attention heads and 2 KV heads"):
            model.plan(QuantConfig(), 3)

    def test_experts_are_shared_out_over_no_more_gpus_than_there_are(self, moe):
        assert moe.num_experts == NUM_EXPERTS
        assert moe.plan(QuantConfig(indivisible="keep_bf16"), 2, expert_parallel=True).quantized
        for quant in (QuantConfig(), QuantConfig(weights="none")):
            with pytest.raises(ValueError, match=r"8 experts.*engine\.tensor_parallel_size=16 .*set it to 8 at most"):
                moe.plan(quant, 16, expert_parallel=True)

    def test_a_dense_model_has_no_experts_to_share_out(self, of_family):
        with pytest.raises(ValueError, match=r"engine\.expert_parallel is true.*is a dense model.*set it to false"):
            of_family("llama").plan(QuantConfig(weights="none"), 2, expert_parallel=True)


class TestExperts:
    def test_an_expert_sent_both_stacked_and_alone_is_a_duplicate(self, moe):
        table = table_of(moe)
        table[STACKED] = UploadTensor(name=STACKED, dtype="bfloat16", shape=moe.in_memory[STACKED])
        assert EXPERT in refusal(moe, table.values(), BF16)["duplicate"]

    @pytest.mark.parametrize(
        ("change", "what", "why"),
        [
            ({"shape": (4, 256, 256)}, "wrong_shape", " is [4, 256, 256], the model's is "),
            ({"dtype": "float8_e4m3fn"}, "wrong_dtype", "send codes and scales under the names on disk, each expert's"),
        ],
    )
    def test_stacked_experts_of_wrong_shape_or_in_codes_are_named_and_not_split(self, moe, change, what, why):
        table = {name: tensor for name, tensor in table_of(moe).items() if ".layers.0.mlp.experts." not in name}
        for name in (STACKED, STACKED.replace("gate_up", "down")):
            table[name] = UploadTensor(name=name, dtype="bfloat16", shape=moe.in_memory[name])
        table[STACKED] = table[STACKED].model_copy(update=change)
        [(found, [line])] = refusal(moe, table.values(), moe.plan(QuantConfig())).items()
        assert found == what and line.startswith(STACKED) and why in line


class TestCodes:
    def test_codes_are_accepted_with_their_scales(self, moe):
        plan, table = moe.plan(QuantConfig()), table_of(moe)
        for name in (EXPERT, "model.layers.1.self_attn.q_proj.weight"):
            table[name] = table[name].model_copy(update={"dtype": "float8_e4m3fn"})
            rows, columns = table[name].shape
            scales = f"{name}_scale_inv"
            table[scales] = UploadTensor(name=scales, dtype="float32", shape=(-(-rows // 128), -(-columns // 128)))
        moe.check_table(table.values(), plan)
        del table[scales]
        assert refusal(moe, table.values(), plan) == {"missing": [scales]}

    def test_scales_with_wrong_shape_dtype_or_no_codes_are_refused(self, moe):
        table, scales = table_of(moe), f"{EXPERT}_scale_inv"
        table[scales] = UploadTensor(name=scales, dtype="bfloat16", shape=(1, 1))
        assert refusal(moe, table.values(), moe.plan(QuantConfig())) == {
            "wrong_shape": [f"{scales} is [1, 1], the model's is [1, 2]"],
            "wrong_dtype": [
                f"{scales} is bfloat16, block scales are float32",
                f"{scales} is of no use: {EXPERT} has not come as float8_e4m3fn",
            ],
        }
        assert refusal(moe, table.values(), BF16) == {"unknown": [scales]}

    @pytest.mark.parametrize(
        ("name", "dtype", "why"),
        [
            ("model.norm.weight", "float8_e4m3fn", "it is not quantized in this service: send it in bfloat16"),
            (EXPERT, "float8_e4m3fn", "it is not quantized in this service: send it in bfloat16"),
            ("model.layers.0.self_attn.q_proj.weight", "int8", "codes are float8_e4m3fn in this service"),
        ],
    )
    def test_codes_of_what_is_not_quantized_or_otherwise_are_refused(self, moe, name, dtype, why):
        table = table_of(moe)
        table[name] = table[name].model_copy(update={"dtype": dtype})
        [(what, [line])] = refusal(moe, table.values(), moe.plan(QuantConfig(skip=("*.layers.0.mlp.experts",)))).items()
        assert what == "wrong_dtype" and line.startswith(f"{name} is {dtype}, ") and line.endswith(why)


class TestRefusedModels:
    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ("{", "not a valid JSON file"),
            ("{}", "model_type"),
            ('{"model_type": "unheard-of"}', "unheard-of"),
            ('{"model_type": "vit"}', "ViTConfig"),
            ('{"model_type": "qwen2", "hidden_size": "wide"}', "'hidden_size': .*expected int, got str"),
            ('{"model_type": "qwen2", "hidden_size": -1}', "negative dimension"),
        ],
    )
    def test_a_config_of_no_language_model_is_refused_in_one_line(self, tmp_path, config, reason):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match=f"config.json describes no causal language model.*{reason}") as refused:
            ServedModel.load(tmp_path)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("family", ["blip", "pp_formulanet"])
    def test_a_model_without_embedding_or_head_is_refused(self, tmp_path, family):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(ValueError, match=rf"is a {family}, which this release cannot serve.*no output head"):
            ServedModel.load(tmp_path)

    def test_a_folder_without_a_model_says_what_to_do(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no config\.json: name a folder.*model\.create"):
            ServedModel.load(tmp_path / "missing")


NEXT_TOKEN = {"deepseek_v3": "num_nextn_predict_layers", "minimax_m2": "num_mtp_modules"}


def described(folder: Path, family: str, **fields: object) -> ServedModel:
    """A model of a family by config.json alone, which has ``fields`` beside the usual ones."""
    folder.mkdir()
    config = config_of(family) if family in FAMILIES else family_config(family)
    (folder / "config.json").write_text(json.dumps({**config.to_diff_dict(), **fields}))
    return ServedModel.load(folder)


class TestIgnored:
    @pytest.mark.parametrize(
        ("family", "name"),
        [
            ("deepseek_v3", "model.layers.61.mlp.experts.3.up_proj.weight_scale_inv"),
            ("glm4_moe", "model.layers.46.eh_proj.weight"),
            ("glm4_moe", "model.layers.92.mlp.experts.gate_up_proj"),
            ("qwen3_next", "mtp.layers.0.mlp.gate.weight"),
            ("qwen3_5_text", "mtp.fc.weight"),
            ("qwen3_5_text", "model.visual.merger.norm.weight"),
            ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"),
            ("gpt2", "h.0.attn.bias"),
            ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
            ("qwen3", "model.rotary_emb.cos_cached"),
        ],
    )
    def test_what_the_class_leaves_out_is_ignored(self, family, name, tmp_path):
        model = described(tmp_path / family, family)
        tensor = UploadTensor(name=name, dtype="float16", shape=(3,))
        model.check_table([*table_of(model).values(), tensor], BF16)
        assert [name for name in model.stored if name in model.ignored] == []  # gpt2: "attn.bias" is in c_attn.bias

    @pytest.mark.parametrize("family", NEXT_TOKEN)
    def test_layers_behind_the_last_are_ignored_if_config_says(self, family, tmp_path):
        model = described(tmp_path / family, family, **{NEXT_TOKEN[family]: 2})
        assert all(f"model.layers.{layer}.mlp.up_proj.weight" in model.ignored for layer in (2, 3))
        assert "model.layers.4.mlp.up_proj.weight" not in model.ignored

    def test_a_layer_of_the_model_is_never_ignored(self, tmp_path):
        model = described(tmp_path / "m", "glm4_moe", num_hidden_layers=48)
        assert "model.layers.92.mlp.up_proj.weight" in model.ignored
        for name in (*model.shapes, *model.in_memory, "model.layers.46.stranger", "model.layers.46.x_scale_inv"):
            assert name not in model.ignored

    @pytest.mark.parametrize(
        "name", ["model.layers.4.mlp.up_proj.weight", "model.layers.61.eh_proj.weight", "mtp.fc.weight", "lm_head.bias"]
    )
    def test_what_no_class_leaves_out_is_refused_by_name(self, served, name):
        stranger = UploadTensor(name=name, dtype="bfloat16", shape=(1,))
        ignored = UploadTensor(name="rotary_emb.inv_freq", dtype="float32", shape=(1,))
        table = [*table_of(served).values(), stranger, ignored]
        assert refusal(served, table, BF16) == {"unknown": [name]}

    def test_an_ignored_tensor_has_a_largest_size(self, served):
        name = "rotary_emb.cos_cached"
        fits, larger = (UploadTensor(name=name, dtype="int8", shape=(size,)) for size in (512 << 20, (512 << 20) + 1))
        served.check_table([*table_of(served).values(), fits], BF16)
        assert refusal(served, [*table_of(served).values(), larger], BF16) == {
            "too_large": [f"{name} has {larger.nbytes} bytes"]
        }

    def test_the_summary_counts_tensors_by_pattern(self):
        ignored = IgnoredTensors(patterns=("^mtp", r"inv_freq$"), kept=("mtp.kept",))
        assert "2 × ^mtp, 1 × inv_freq$" in ignored.summary(["mtp.a", "mtp.b", "x.inv_freq", "mtp.kept", "y"])
        assert ignored.summary(["mtp.kept", "y"]) == ""
