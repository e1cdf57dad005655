"""Which tensors of a model are quantized, and why the others are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rollout_service.config import QuantConfig
from rollout_service.quant.blockwise import BLOCK

SCALE_SUFFIX = "_scale_inv"
"""Appended to a weight's name for its block scales."""

ROW_PARALLEL = ("o_proj", "down_proj")
"""Linear modules whose input (K) tensor parallelism cuts; the output (N) of all others is cut."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear modules of one parent that the engine fuses into one, which is quantized whole or not at all."""


@dataclass(frozen=True)
class QuantPlan:
    """What happens to the linear modules of one model."""

    quantized: frozenset[str]
    """Names of the weights that become FP8 codes and scales."""
    not_converted: tuple[str, ...]
    """Linear modules that stay in BF16 although they could be quantized; vLLM is told."""


def plan(linears: Mapping[str, tuple[int, int]], config: QuantConfig, tensor_parallel_size: int = 1) -> QuantPlan:
    """Decide for each linear module (name → weight shape ``[N, K]``; lm_head and routers are not among them).

    Raises ValueError naming every module whose shard does not divide into 128×128 blocks, every pattern of
    ``config.skip`` that matches nothing, or every module that is skipped without the others it is fused with.
    """
    if config.weights == "none":
        return QuantPlan(frozenset(), ())
    skipped = _skipped(linears, config.skip)
    offenders = [
        f"{name} [{rows}, {columns}]"
        for name, (rows, columns) in linears.items()
        if name not in skipped and not _divides(name, rows, columns, tensor_parallel_size)
    ]
    if offenders:
        raise ValueError(
            f"{len(offenders)} linear modules do not divide into {BLOCK}×{BLOCK} blocks with tensor_parallel_size="
            f"{tensor_parallel_size}: {', '.join(offenders[:8])}: lower it, or leave them in BF16 through quant.skip"
        )
    return QuantPlan(frozenset(f"{name}.weight" for name in linears if name not in skipped), tuple(sorted(skipped)))


def _skipped(linears: Mapping[str, tuple[int, int]], patterns: tuple[str, ...]) -> set[str]:
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in linears)]
    if idle:
        raise ValueError(
            f"quant.skip: {', '.join(idle)} matches no linear module; their names are like "
            f"{next(iter(linears), '(there are none)')}"
        )
    skipped = {name for name in linears if any(fnmatchcase(name, pattern) for pattern in patterns)}
    torn = [name for name in linears if name not in skipped and not skipped.isdisjoint(_fused_with(name))]
    if torn:
        raise ValueError(
            f"quant.skip leaves out only a part of what the engine fuses into one layer; {len(torn)} modules are to be "
            f"skipped with it: {', '.join(torn[:8])}"
        )
    return skipped


def _fused_with(name: str) -> set[str]:
    parent, _, leaf = name.rpartition(".")
    return {f"{parent}.{other}" for group in FUSED if leaf in group for other in group}


def _divides(name: str, rows: int, columns: int, tensor_parallel_size: int) -> bool:
    if name.rsplit(".", 1)[-1] in ROW_PARALLEL:
        return rows % BLOCK == 0 and columns % (BLOCK * tensor_parallel_size) == 0
    return rows % (BLOCK * tensor_parallel_size) == 0 and columns % BLOCK == 0
