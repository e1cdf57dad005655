"""vLLM's layout of linear modules by model family: which it fuses, and how tensor parallelism shards them.

From vLLM 0.32: ``packed_modules_mapping`` and the classes of linear layers in its ``models/``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rollout_service.protocol.experts import ExpertNaming

FAMILIES: dict[str, ExpertNaming | None] = {
    "llama": None,
    "mistral": None,
    "qwen2": None,
    "qwen3": None,
    "qwen2_moe": ExpertNaming(),
    "qwen3_moe": ExpertNaming(),
    "deepseek_v2": ExpertNaming(),
    "deepseek_v3": ExpertNaming(),
    "mixtral": ExpertNaming(gate="w1", up="w3", down="w2", block="block_sparse_moe"),
}
"""``model_type`` of config.json → names of its routed experts on disk; None: a dense model."""

Cut = Literal["output", "input", "none"]
"""Dimension of a weight [N, K] that tensor parallelism divides: N, K, or neither (each GPU holds all of it)."""

CUTS: dict[str, Cut] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), "output"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "output"),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "input"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "none"),
}
"""Last part of a linear module's name → its cut."""

KV = ("k_proj", "v_proj")
"""Projections whose heads are repeated if there are fewer heads than GPUs."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Linear modules of one parent that vLLM fuses, in its order. A fused module is quantized whole or not at all."""

_EXPERT = re.compile(r"^(.+\.experts)\.\d+\.[^.]+$")


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads of a model: tensor parallelism gives each GPU whole ones."""

    query: int
    kv: int


@dataclass(frozen=True)
class EngineModule:
    """One module of the engine, and the modules of the checkpoint that it is made of, in order.

    All routed experts of a layer are one module, ``….experts``.
    """

    name: str
    parts: tuple[str, ...]

    @property
    def holds_experts(self) -> bool:
        """Return True for the routed experts of a layer."""
        return _EXPERT.match(self.parts[0]) is not None


def engine_modules(names: Iterable[str]) -> list[EngineModule]:
    """Return the engine's modules that the linear modules ``names`` of a checkpoint become."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(_engine_name(name), []).append(name)
    return [_engine_module(name, members) for name, members in parts.items()]


def _engine_name(name: str) -> str:
    if expert := _EXPERT.match(name):
        return expert[1]
    parent, _, leaf = name.rpartition(".")
    return next((f"{parent}.{fused}" for fused, leaves in FUSED.items() if leaf in leaves), name)


def _engine_module(name: str, members: list[str]) -> EngineModule:
    if _EXPERT.match(members[0]):
        return EngineModule(name, tuple(members))
    if len(members) == 1:  # without q_lora_rank, DeepSeek has separate q_proj and kv_a_proj_with_mqa
        return EngineModule(members[0], tuple(members))
    order = FUSED[name.rpartition(".")[2]]
    return EngineModule(name, tuple(sorted(members, key=lambda member: order.index(member.rpartition(".")[2]))))


def shard_shape(
    name: str, shape: tuple[int, int], ways: int, heads: Heads | None = None, *, expert_parallel: bool = False
) -> tuple[int, int]:
    """Return the shard of a linear module's weight ``shape`` [N, K] on one of ``ways`` GPUs.

    ``expert_parallel``: a routed expert is whole, on one GPU.

    Raises ValueError if the module is of an unknown kind or cannot be divided evenly.
    """
    if expert_parallel and _EXPERT.match(name):
        return shape
    leaf = name.rpartition(".")[2]
    if leaf not in CUTS:
        raise ValueError(f"{name}: it is not known how vLLM divides a module called {leaf} between GPUs")
    rows, columns = shape
    if CUTS[leaf] == "none":
        return shape
    if CUTS[leaf] == "input":
        return rows, _divide(name, columns, ways)
    return _divide(name, rows, min(ways, heads.kv) if heads and leaf in KV else ways), columns


def require_whole_heads(heads: Heads, ways: int) -> None:
    """Raise ValueError if ``ways`` GPUs cannot each have the same number of whole heads."""
    if heads.query % ways or (heads.kv % ways and ways % heads.kv):
        raise ValueError(
            f"tensor_parallel_size={ways} cannot share out {heads.query} attention heads and {heads.kv} KV heads: it "
            "must divide the first, and divide or be a multiple of the second"
        )


def _divide(name: str, size: int, ways: int) -> int:
    if size % ways:
        raise ValueError(f"{name}: its dimension of {size} cannot be divided between {ways} GPUs")
    return size // ways
