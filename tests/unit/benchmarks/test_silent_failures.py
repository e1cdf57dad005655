"""Wrong pushes keep every name and shape, and differ in what they say they spoil."""

import torch

from benchmarks.training.silent_failures import FAILURES

LAYER = "model.layers.{}.mlp.experts.down_proj"
OLD = {LAYER.format(layer): torch.zeros(4, 2, 2) for layer in range(3)} | {"model.norm.weight": torch.zeros(2)}
NEW = {name: torch.arange(float(tensor.numel())).view_as(tensor) + 1 for name, tensor in OLD.items()}


def changed(failure: str) -> set[str]:
    spoiled = FAILURES[failure][1](NEW, OLD)
    assert {name: tensor.shape for name, tensor in spoiled.items()} == {name: t.shape for name, t in NEW.items()}
    return {name for name, tensor in spoiled.items() if not torch.equal(tensor, NEW[name])}


def test_each_failure_spoils_what_it_names():
    assert changed("none") == set()
    assert changed("layer") == {LAYER.format(1)}
    assert changed("experts") == {LAYER.format(layer) for layer in range(3)}
    assert changed("nothing") == set(NEW)
