"""vLLM's layout of linear modules by model family: which it fuses, and how tensor parallelism shards them.

From vLLM 0.32: ``packed_modules_mapping`` and the classes of linear layers in its ``models/``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.model.engine_layout import Cut, EngineLayout, LayoutModule, LayoutPart, Section, Shape
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


def table_layout(linears: Mapping[str, Shape], heads: Heads | None = None) -> EngineLayout:
    """Return the layout of a checkpoint's linear modules (name → weight shape), by the tables of this file.

    ``heads``: None if each GPU has KV heads of its own. Raises ValueError for a module of an unknown kind.
    """
    members: dict[str, list[str]] = {}
    for name in linears:
        members.setdefault(_engine_name(name), []).append(name)
    return EngineLayout(
        source="model/families.py, as in vLLM 0.32",
        modules=tuple(_module(name, parts, linears, heads) for name, parts in members.items()),
        kept={},
        fused=FUSED,
    )


def _engine_name(name: str) -> str:
    if expert := _EXPERT.match(name):
        return expert[1]
    parent, _, leaf = name.rpartition(".")
    return next((f"{parent}.{fused}" for fused, leaves in FUSED.items() if leaf in leaves), name)


def _module(name: str, members: list[str], linears: Mapping[str, Shape], heads: Heads | None) -> LayoutModule:
    experts = _EXPERT.match(members[0]) is not None
    if not experts and len(members) == 1:  # without q_lora_rank, DeepSeek has separate q_proj and kv_a_proj_with_mqa
        name = members[0]
    elif not experts:
        order = FUSED[name.rpartition(".")[2]]
        members = sorted(members, key=lambda member: order.index(member.rpartition(".")[2]))
    return LayoutModule(name=name, parts=tuple(_part(each, linears[each], heads) for each in members), experts=experts)


def _part(name: str, shape: Shape, heads: Heads | None) -> LayoutPart:
    leaf = name.rpartition(".")[2]
    if leaf not in CUTS:
        raise ValueError(f"{name}: it is not known how vLLM divides a module called {leaf} between GPUs")
    sections = (Section(rows=shape[0], max_ways=heads.kv),) if heads and leaf in KV else ()
    return LayoutPart(name=name, cut=CUTS[leaf], sections=sections)


def require_whole_heads(heads: Heads, ways: int) -> None:
    """Raise ValueError if ``ways`` GPUs cannot each have the same number of whole heads."""
    if heads.query % ways or (heads.kv % ways and ways % heads.kv):
        raise ValueError(
            f"tensor_parallel_size={ways} cannot share out {heads.query} attention heads and {heads.kv} KV heads: it "
            "must divide the first, and divide or be a multiple of the second"
        )
