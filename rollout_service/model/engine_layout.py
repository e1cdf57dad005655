"""What vLLM makes of a checkpoint's modules: which it fuses, how tensor parallelism cuts them, which stay in BF16.

``families.py`` knows it of a few families; of any other model ``vllm_layout.py`` asks vLLM. Needs neither torch nor
vllm.
"""

from collections.abc import Mapping
from functools import cached_property

from rollout_service.model.families import Cut, EngineModule
from rollout_service.protocol.base import Frozen

Shape = tuple[int, int]


class Section(Frozen):
    """Rows of a weight that tensor parallelism cuts by themselves, such as the queries of a ``qkv_proj``."""

    rows: int
    most_ways: int | None = None
    """Between how many GPUs they are divided at most, as many as there are KV heads: further ones hold copies."""


class LayoutPart(Frozen):
    """A linear module of the checkpoint, whose weight [N, K] vLLM takes as it is."""

    name: str
    cut: Cut
    sections: tuple[Section, ...] = ()
    """Of its rows, in their order; empty: all of them are one."""

    def shards(self, shape: Shape, ways: int) -> tuple[Shape, ...]:
        """What one of ``ways`` GPUs holds of the weight ``shape``, a matrix for each section.

        Raises ValueError if it cannot be divided evenly.
        """
        rows, columns = shape
        sections = self.sections or (Section(rows=rows),)
        if self.cut == "output":
            return tuple(
                (self._divided(section.rows, min(ways, section.most_ways or ways)), columns) for section in sections
            )
        columns = columns if self.cut == "none" else self._divided(columns, ways)
        return tuple((section.rows, columns) for section in sections)

    def _divided(self, size: int, ways: int) -> int:
        if size % ways:
            raise ValueError(f"{self.name}: {size} rows or columns cannot be divided between {ways} GPUs")
        return size // ways


class LayoutModule(Frozen):
    """A linear module of the engine, or the routed experts of a layer, and what of the checkpoint it is made of."""

    name: str
    """What vLLM looks up in ``modules_to_not_convert``."""
    parts: tuple[LayoutPart, ...]
    """In vLLM's order. An expert's matrices are three parts."""
    experts: bool = False
    """It is the routed experts of a layer."""


class EngineLayout(Frozen):
    """The linear modules of one model as vLLM builds them."""

    source: str
    """Whose word this is: vLLM's version and the class of its model."""
    modules: tuple[LayoutModule, ...]
    """Those that can be quantized."""
    kept: Mapping[str, str]
    """Modules of the checkpoint that stay in BF16 whatever is asked for → why."""
    not_converted: tuple[str, ...] = ()
    """What vLLM would quantize of ``kept`` unless it is told not to, by the names that it looks up."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """vLLM's ``packed_modules_mapping``, by which it also looks for the parts of a fused module."""
    not_loaded: tuple[str, ...] = ()
    """Tensors of the checkpoint that vLLM has no place for; a version must not have them."""

    def engine_modules(self) -> list[EngineModule]:
        """``modules`` as the plan has them."""
        return [EngineModule(module.name, tuple(part.name for part in module.parts)) for module in self.modules]

    def linears(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
        """Modules that can be quantized → shape [N, K] of their weights; ``shapes``: of all tensors, by name."""
        return {
            name: (shape[0], shape[1])
            for tensor, shape in shapes.items()
            if (name := tensor.removesuffix(".weight")) in self._parts and name != tensor
        }

    def shards(self, name: str, shape: Shape, ways: int, *, expert_parallel: bool = False) -> tuple[Shape, ...]:
        """What one of ``ways`` GPUs holds of the weight ``shape`` [N, K] of a module of the checkpoint, by sections.

        ``expert_parallel``: a routed expert is whole, on the one GPU that has it. Raises ValueError if it cannot be
        divided evenly.
        """
        if expert_parallel and name in self._experts:
            return (shape,)
        return self._parts[name].shards(shape, ways)

    def is_cut(self, name: str) -> bool:
        """Whether tensor parallelism divides a module of the checkpoint."""
        return self._parts[name].cut != "none"

    def known_as(self, module: str) -> tuple[str, ...]:
        """The names by which vLLM looks a module of the engine up, to be told to leave it in BF16."""
        parent, _, leaf = module.rpartition(".")
        return (module, *(f"{parent}.{part}" for part in self.fused.get(leaf, ()) if part != leaf))

    @cached_property
    def _parts(self) -> dict[str, LayoutPart]:
        return {part.name: part for module in self.modules for part in module.parts}

    @cached_property
    def _experts(self) -> frozenset[str]:
        return frozenset(part.name for module in self.modules if module.experts for part in module.parts)
