"""Scales of an FP8 KV cache for models of two layers, none of which is like another."""

from collections.abc import Mapping, Sequence

LAYERS = 2


def some_scales(version: int) -> dict[str, float]:
    """Other ones for each tensor and each version; exact in fp32, and not in BF16."""
    names = [f"model.layers.{layer}.self_attn.{x}_scale" for layer in range(LAYERS) for x in "qkv"]
    return {name: 1 + (1 + place + len(names) * version) / 1024 for place, name in enumerate(names)}


def assert_held(held: Mapping[str, Sequence[float]], scales: Mapping[str, float]) -> None:
    """``held``, what ``OneEngine.kv_scales`` says, are these scales, in every copy."""
    assert {name: set(copies) for name, copies in held.items()} == {name: {s} for name, s in scales.items()}
