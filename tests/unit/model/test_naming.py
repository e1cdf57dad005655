"""Names on disk of families that no table knows are those of the files that transformers writes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_service.config import QuantConfig
from rollout_service.model.naming import naming_of
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.experts import ExpertNaming, pieces
from tests.support import families, models

RENAMED = ["ernie4_5_moe", "gpt_neox", "granitemoe", "minimax_m2", "phimoe"]
ALIKE = ["glm4_moe", "gpt2", "gpt_oss", "olmoe"]


@pytest.mark.parametrize("family", [*RENAMED, *ALIKE])
def test_what_a_trainer_holds_becomes_what_transformers_saves(tmp_path, family):
    folder = families.make_family(tmp_path, family)
    saved = load_file(folder / "model.safetensors")
    held = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    served = ServedModel.load(folder)
    stored = {
        piece.name: tensor[piece.index]
        for name, tensor in held.items()
        for piece in pieces(name, tuple(tensor.shape), served.experts)
    }
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == served.shapes
    assert saved.keys() == stored.keys() - ({"lm_head.weight"} if served.tied else set())
    assert all(torch.equal(stored[name].to(tensor.dtype), tensor) for name, tensor in saved.items())
    assert served.plan(QuantConfig(weights="none")) == QuantPlan(frozenset())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_what_the_table_says_is_what_transformers_says(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.FAMILIES[family]())
    expected = {"mixtral": ExpertNaming(gate="w1", up="w3", down="w2", block="block_sparse_moe"), "llama": None}
    assert naming_of(model) == expected.get(family, ExpertNaming())
