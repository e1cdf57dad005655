"""What a version must bring, worked out from config.json alone."""

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig, PretrainedConfig, Qwen3ForCausalLM, Qwen3MoeConfig

from rollout_service.errors import InvalidManifest
from rollout_service.weights.served_model import EMBEDDING, LM_HEAD, ServedModel
from rollout_service.weights.upload import UploadTensor


@pytest.fixture
def served(tiny_model: Path) -> ServedModel:
    return ServedModel.load(tiny_model)


def table_of(model: ServedModel) -> dict[str, UploadTensor]:
    return {n: UploadTensor(name=n, dtype="bfloat16", shape=shape) for n, shape in model.shapes.items()}


def test_names_and_shapes_are_those_of_the_trainers_state_dict(served: ServedModel, tiny_model: Path) -> None:
    trained = Qwen3ForCausalLM.from_pretrained(tiny_model)
    assert served.shapes == {name: tuple(tensor.shape) for name, tensor in trained.state_dict().items()}


def test_linear_modules_are_the_projections_and_not_the_output_head(served: ServedModel) -> None:
    assert len(served.linears) == served.config.num_hidden_layers * 7
    assert served.linears["model.layers.3.mlp.down_proj"] == (256, 768)
    assert not any("lm_head" in name or "embed" in name or "norm" in name for name in served.linears)


def test_facts_that_the_gateway_needs(served: ServedModel, model: Path) -> None:
    assert served.vocab_size == 128 and not served.tied
    assert served.has_tokenizer
    assert not ServedModel.load(model).has_tokenizer


def test_a_complete_table_is_accepted_in_any_order_and_dtype(served: ServedModel) -> None:
    table = [t.model_copy(update={"dtype": "float32"}) for t in reversed(table_of(served).values())]
    served.check_table(table)


def test_every_difference_is_reported_at_once(served: ServedModel) -> None:
    table = table_of(served)
    del table["model.norm.weight"], table["model.layers.0.mlp.up_proj.weight"]
    name = "model.layers.1.mlp.up_proj.weight"
    table[name] = table[name].model_copy(update={"shape": (256, 768)})
    stranger = UploadTensor(name="model.stranger", dtype="bfloat16", shape=(1,))
    with pytest.raises(InvalidManifest, match="does not fit the served model tiny-qwen3") as refused:
        served.check_table([*table.values(), stranger, table[EMBEDDING], table[EMBEDDING]])
    assert refused.value.detail == {
        "duplicate": [EMBEDDING],
        "unknown": ["model.stranger"],
        "missing": ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
        "wrong_shape": [f"{name} is [256, 768], the model's is [768, 256]"],
    }
    for what in ("1 duplicate", "1 unknown", "2 missing", "1 wrong_shape"):
        assert what in refused.value.message


def test_an_empty_table_lacks_everything(served: ServedModel) -> None:
    with pytest.raises(InvalidManifest) as refused:
        served.check_table([])
    assert refused.value.detail == {"missing": sorted(served.shapes)}


def test_the_output_head_is_optional_where_the_embedding_is_tied(tied_model: Path, served: ServedModel) -> None:
    tied = ServedModel.load(tied_model)
    table = table_of(tied)
    tied.check_table(table.values())
    del table[LM_HEAD]
    tied.check_table(table.values())
    with pytest.raises(InvalidManifest, match=f"1 missing: {LM_HEAD}"):
        served.check_table([t for t in table_of(served).values() if t.name != LM_HEAD])


def test_the_fingerprint_tells_models_apart_and_not_folders(
    model: Path, tied_model: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    assert ServedModel.load(tmp_path).fingerprint == ServedModel.load(tiny_model).fingerprint
    fingerprints = {ServedModel.load(path).fingerprint for path in (tiny_model, model, tied_model)}
    assert len(fingerprints) == 3


def test_loading_leaves_the_default_device_as_it_was(tiny_model: Path) -> None:
    ServedModel.load(tiny_model)
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize(
    "config",
    [Qwen3MoeConfig(num_experts=4), MixtralConfig(num_local_experts=4), DeepseekV3Config(n_routed_experts=4)],
    ids=lambda config: config.model_type,
)
def test_a_mixture_of_experts_is_refused(tmp_path: Path, config: PretrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"mixture of experts \\({config.model_type}\\): dense models only"):
        ServedModel.load(tmp_path)


def test_a_folder_without_a_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: name a folder.*model\.create"):
        ServedModel.load(tmp_path / "missing")
