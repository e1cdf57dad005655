"""Which tensors of a model are quantized, and why the others are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from rollout_service.config import QuantConfig
from rollout_service.quant.blockwise import BLOCK

SCALE_SUFFIX = "_scale_inv"
"""Appended to a weight's name for its block scales."""

ROW_PARALLEL = ("o_proj", "down_proj")
"""Linear modules whose input (K) tensor parallelism cuts; the output (N) of all others is cut."""


@dataclass(frozen=True)
class QuantPlan:
    """What happens to the linear modules of one model."""

    quantized: frozenset[str]
    """Names of the weights that become FP8 codes and scales."""
    not_converted: tuple[str, ...]
    """Linear modules that stay in BF16 although they could be quantized; vLLM is told."""


def plan(linears: Mapping[str, tuple[int, int]], config: QuantConfig, tensor_parallel_size: int = 1) -> QuantPlan:
    """Decide for each linear module (name → weight shape ``[N, K]``; lm_head and routers are not among them).

    Raises ValueError naming every module whose shard does not divide into 128×128 blocks.
    """
    if config.weights == "none":
        return QuantPlan(frozenset(), ())
    skipped = {name for name in linears if any(fnmatch(name, pattern) for pattern in config.skip)}
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


def _divides(name: str, rows: int, columns: int, tensor_parallel_size: int) -> bool:
    if name.rsplit(".", 1)[-1] in ROW_PARALLEL:
        return rows % BLOCK == 0 and columns % (BLOCK * tensor_parallel_size) == 0
    return rows % (BLOCK * tensor_parallel_size) == 0 and columns % BLOCK == 0
