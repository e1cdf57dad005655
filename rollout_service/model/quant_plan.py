"""Choose the tensors of a model that are quantized, with reasons for the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from rollout_service.config.engine import QuantConfig
from rollout_service.model.engine_layout import (
    EngineLayout,
    Heads,
    LayoutModule,
    Shape,
    require_whole_heads,
    table_layout,
)
from rollout_service.model.names import collapse, kind
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import FP8_BLOCK, WEIGHT_FORMATS, WeightFormat

SCALE_SUFFIX = FP8_BLOCK.scale_suffix
"""Suffix of the name of a weight's block scales."""


@dataclass(frozen=True)
class QuantPlan:
    """Quantization of the linear modules of one model."""

    quantized: frozenset[str]
    """Names of the weights that become codes and scales."""
    not_converted: tuple[str, ...] = ()
    """Names of ``kept`` that vLLM looks up in ``modules_to_not_convert``, without routers, which are never quantized.

    Modules that vLLM fuses are listed under their own names and the fused one (Qwen3-MoE's dense layers are only looked
    up by the second), routed experts as one module ``….experts``.
    """
    kept: Mapping[str, str] = field(default_factory=dict)
    """Linear modules that stay in BF16 although they could be quantized → reason."""
    form: WeightFormat = FP8_BLOCK
    """Format of ``quantized``."""


def plan(
    linears: Mapping[str, Shape],
    config: QuantConfig,
    tensor_parallel_size: int = 1,
    heads: Heads | None = None,
    *,
    expert_parallel: bool = False,
    layout: EngineLayout | None = None,
) -> QuantPlan:
    """Decide for each linear module (name → weight shape ``[N, K]``, without lm_head and routers).

    ``heads``: None if each GPU has KV heads of its own. ``expert_parallel``: routed experts are not sharded.
    ``layout``: vLLM's layout of the modules; None: that of ``table_layout``.

    Raises ValueError for:
    - modules whose shard does not divide into 128×128 blocks (unless ``config.indivisible`` keeps them in BF16), or
      that cannot be sharded at all
    - patterns of ``config.skip`` that match nothing
    - modules that are skipped without the others with which they are fused
    - so many layers in BF16 that none is quantized
    """
    if config.weights == "none":
        return QuantPlan(frozenset())
    form = WEIGHT_FORMATS[config.weights]
    if heads is not None:
        require_whole_heads(heads, tensor_parallel_size)
    layout = table_layout(linears, heads) if layout is None else layout
    kept = _skipped_modules(layout.modules, config.skip)
    candidates = [module for module in layout.modules if module.names[0] not in kept]
    ragged_for = partial(_ragged_modules, layout, candidates, linears)
    ragged = ragged_for(tensor_parallel_size, expert_parallel)
    if not form.in_blocks:  # only blocks must divide: modules that cannot be sharded at all were refused above
        ragged = {}
    if ragged and config.indivisible == "error":
        ways_out = _ways_out(ragged_for, tensor_parallel_size, heads, expert_parallel)
        raise ValueError(_refusal(ragged, tensor_parallel_size, ways_out))
    for module in layout.modules:
        if not ragged.keys().isdisjoint(module.names):
            kept |= {part: _indivisible(module, part, ragged) for part in module.names}
    in_bf16 = [*(module.name for module in layout.modules if module.names[0] in kept), *layout.not_converted]
    not_converted = sorted(name for module in in_bf16 for name in layout.known_as(module))
    quantized = frozenset(f"{name}.weight" for name in linears if name not in kept)
    return QuantPlan(quantized, tuple(not_converted), {**layout.kept, **kept}, form)


def _skipped_modules(modules: Sequence[LayoutModule], patterns: tuple[str, ...]) -> dict[str, str]:
    """Return checkpoint modules that a pattern matches, directly or through their fused module → reason."""
    names = [name for module in modules for name in {module.name, *module.names}]
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise ValueError(
            f"quant.skip: {', '.join(idle)} matches no linear module; their names are like "
            f"{modules[0].names[0] if modules else '(there are none)'}"
        )
    skipped: dict[str, str] = {}
    torn: list[str] = []
    for module in modules:
        found = {
            part: f"quant.skip {pattern}"
            for part in module.names
            for pattern in reversed(patterns)  # the first is kept
            if fnmatchcase(part, pattern) or fnmatchcase(module.name, pattern)
        }
        skipped |= found
        torn += [part for part in module.names if found and part not in found]
    if torn:
        lines = collapse(torn)
        more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise ValueError(
            f"quant.skip leaves out only a part of what the engine fuses into one layer; {len(torn)} modules are to be "
            f"skipped with it: {', '.join(lines[:8])}{more}"
        )
    return skipped


def _ragged_modules(
    layout: EngineLayout,
    modules: Iterable[LayoutModule],
    linears: Mapping[str, Shape],
    ways: int,
    expert_parallel: bool,
) -> dict[str, Shape]:
    """Return modules whose shard on a GPU is not a whole number of blocks → that shard."""
    found: dict[str, Shape] = {}
    for module in modules:
        for part in module.names:
            shards = layout.shards(part, linears[part], ways, expert_parallel=expert_parallel)
            # the last part of a layer may end with an incomplete block, like DeepSeek's kv_a_proj_with_mqa, which has
            # 576 rows in its published FP8 format
            may_end_ragged = not layout.is_cut(part) and part == module.names[-1]
            for place, (rows, columns) in enumerate(shards, start=1):
                if columns % BLOCK or (rows % BLOCK and not (may_end_ragged and place == len(shards))):
                    found.setdefault(part, (rows, columns))
    return found


def _ways_out(
    ragged_for: Callable[[int, bool], dict[str, Shape]], ways: int, heads: Heads | None, expert_parallel: bool
) -> list[str]:
    """Return settings that make every shard a whole number of blocks; each one is sufficient."""

    def divides(fewer: int, whole_experts: bool) -> bool:
        try:
            if heads is not None:
                require_whole_heads(heads, fewer)
            return not ragged_for(fewer, whole_experts)
        except ValueError:
            return False

    found = []
    if ways > 1 and not expert_parallel and divides(ways, True):
        found.append("engine.expert_parallel: true, so that each GPU has whole experts")
    sizes = [str(fewer) for fewer in range(1, ways) if ways % fewer == 0 and divides(fewer, expert_parallel)]
    if sizes:
        found.append(f"engine.tensor_parallel_size: {' or '.join(sizes)}")
    return [*found, "quant.indivisible: keep_bf16, which leaves them in BF16"]


def _refusal(ragged: Mapping[str, Shape], ways: int, ways_out: list[str]) -> str:
    by_shard: dict[Shape, list[str]] = {}
    for name, shard in ragged.items():
        by_shard.setdefault(shard, []).append(name)
    lines = [f"{line} {list(shard)}" for shard, names in by_shard.items() for line in collapse(names)]
    return (
        f"{len(ragged)} linear modules do not divide into {BLOCK}×{BLOCK} blocks with tensor_parallel_size={ways}; "
        f"each GPU's shard would be: {', '.join(lines)}: set {'; or '.join(ways_out)}"
    )


def _indivisible(module: LayoutModule, part: str, ragged: Mapping[str, Shape]) -> str:
    if part in ragged:
        return f"a GPU's shard {list(ragged[part])} is no whole number of {BLOCK}×{BLOCK} blocks"
    other = next(name for name in module.names if name in ragged)
    return f"in one layer with {kind(other)}, of which {_indivisible(module, other, ragged)}"
