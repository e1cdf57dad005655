"""Stacked experts are taken apart into exactly what a checkpoint holds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_service.model.engine_layout import FAMILIES
from rollout_service.protocol.experts import ExpertNaming, Piece, pieces
from tests.support.models import make_model

QWEN = ExpertNaming()
MIXTRAL = ExpertNaming(gate="w1", up="w3", down="w2", block="block_sparse_moe")
LAYER = "model.layers.0."


@pytest.mark.parametrize("naming", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
@given(experts=st.integers(1, 6), half=st.integers(1, 5), columns=st.integers(1, 5))
def test_every_number_of_stacked_experts_is_in_exactly_one_piece(naming, leaf, experts, half, columns):
    shape = (experts, 2 * half, columns)
    numbers = torch.arange(math.prod(shape)).view(shape)
    taken = pieces(f"{LAYER}mlp.experts.{leaf}", shape, naming)
    assert sorted(n for piece in taken for n in numbers[piece.index].flatten().tolist()) == list(
        range(len(numbers.flatten()))
    )
    assert all(numbers[piece.index].shape == piece.shape for piece in taken)
    assert len({piece.name for piece in taken}) == len(taken) == experts * (2 if leaf == "gate_up_proj" else 1)


@pytest.mark.parametrize(
    "family", [family for family, naming in FAMILIES.items() if naming and family != "deepseek_v2"]
)
def test_pieces_are_the_tensors_that_transformers_saves(family, tmp_path):
    saved = load_file(make_model(tmp_path, family) / "model.safetensors")
    held = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    taken = {
        piece.name: tensor[piece.index]
        for name, tensor in held.items()
        for piece in pieces(name, tuple(tensor.shape), FAMILIES[family])
    }
    assert taken.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(taken[name], saved[name])] == []


@pytest.mark.parametrize(
    ("name", "naming"),
    [
        (f"{LAYER}mlp.gate_proj.weight", QWEN),
        (f"{LAYER}mlp.experts.3.up_proj.weight", QWEN),
        (f"{LAYER}mlp.shared_expert.down_proj.weight", QWEN),
        (f"{LAYER}mlp.experts.gate_up_proj", None),
        (f"{LAYER}block_sparse_moe.experts.3.w1.weight", MIXTRAL),
        (f"{LAYER}block_sparse_moe.gate.weight", MIXTRAL),
    ],
)
def test_what_has_its_name_on_disk_already_is_stored_as_it_is(name, naming):
    assert pieces(name, (2, 4), naming) == (Piece(name, (2, 4)),)


def test_stacked_experts_that_do_not_split_are_refused_by_name():
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj \[2, 5, 4\] cannot be gate and up.*odd"):
        pieces(f"{LAYER}mlp.experts.gate_up_proj", (2, 5, 4), QWEN)
    for leaf in ("gate_up_proj", "down_proj"):
        with pytest.raises(ValueError, match=rf"experts\.{leaf} has shape \[4, 4\].*three dimensions"):
            pieces(f"{LAYER}mlp.experts.{leaf}", (4, 4), QWEN)
