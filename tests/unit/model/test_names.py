"""Many names in few words, none of them lost and none invented."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.model.names import collapse, kind, ranges


def expanded(line: str) -> list[str]:
    """Every name that a collapsed line stands for."""
    fields = re.split(r"\{([\d,-]+)\}", line)
    choices = [[field] if i % 2 == 0 else numbers(field) for i, field in enumerate(fields)]
    return ["".join(parts) for parts in product(*choices)]


def numbers(text: str) -> list[str]:
    found: list[str] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += map(str, range(int(first), int(last or first) + 1))
    return found


NAMES = st.builds(
    lambda layer, expert, leaf: f"model.layers.{layer}.mlp" + (f".experts.{expert}" if expert else "") + f".{leaf}",
    st.integers(0, 4),
    st.integers(0, 12),
    st.sampled_from(["up_proj", "w2"]),
)


@given(st.sets(NAMES) | st.just({"lm_head", "model.norm"}))
def test_a_collapsed_list_stands_for_exactly_the_names_given(names):
    assert sorted(name for line in collapse(sorted(names)) for name in expanded(line)) == sorted(names)


def test_every_expert_of_every_layer_is_one_line():
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(48) for e in range(128)]
    assert collapse(names) == ["model.layers.{0-47}.mlp.experts.{0-127}.up_proj"]
    assert collapse(["a.w1", "a.w2"]) == ["a.w1", "a.w2"], "numbers in words"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.mlp.experts.7.up_proj", "mlp.experts.*.up_proj"),
        ("model.norm", "norm"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_kind_of_a_module_leaves_out_layer_and_expert(name, expected):
    assert kind(name) == expected


def test_ranges_join_neighbours():
    assert ranges([7, 0, 1, 3, 2, 9, 10]) == "0-3,7,9-10"
    assert ranges([]) == ""
