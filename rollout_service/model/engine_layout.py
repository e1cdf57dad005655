"""vLLM's layout of a checkpoint's modules: which it fuses, how tensor parallelism shards them, which stay in BF16.

``families.py`` has a table of a few families; for any other model ``vllm_layout.py`` asks vLLM. Needs neither torch nor
vllm.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from rollout_service.protocol.base import Frozen

Shape = tuple[int, int]
Cut = Literal["output", "input", "none"]
"""Dimension of a weight [N, K] that tensor parallelism divides: N, K, or neither (each GPU holds all of it)."""


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
