"""The small model is an ordinary Hugging Face folder that fits blockwise FP8."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_service.config.engine import QuantConfig
from rollout_service.model.quant_plan import plan
from rollout_service.model.served_model import ServedModel
from rollout_service.model.tiny import make_tiny_qwen3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_qwen3(path)
    return path


def test_transformers_loads_it_and_it_generates(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and 1e6 < model.num_parameters() < 1e7
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


def test_text_survives_the_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "12+34= a\tB\n(ü)"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_every_linear_module_divides_into_blocks(folder):
    model = ServedModel.load(folder)
    assert plan(model.linears, QuantConfig()).quantized == {f"{name}.weight" for name in model.linears}


def test_a_seed_makes_the_same_bytes_once_and_another_seed_does_not(folder, tmp_path):
    other = tmp_path / "tiny"
    make_tiny_qwen3(other)
    name = "model.layers.0.mlp.up_proj.weight"
    first = load_file(folder / "model.safetensors")[name]
    assert torch.equal(load_file(other / "model.safetensors")[name], first)
    make_tiny_qwen3(other, seed=1)
    assert torch.equal(load_file(other / "model.safetensors")[name], first), "a model that is there stays"
    make_tiny_qwen3(tmp_path / "other", seed=1)
    assert not torch.equal(load_file(tmp_path / "other" / "model.safetensors")[name], first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tiny"]
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(FileExistsError, match=r"cannot make a model at .*other: something that is not a model folder"):
        make_tiny_qwen3(tmp_path / "other")
