"""How fast a decode kernel of ours reads an FP8 KV cache, by its variants, against FlashAttention 3; on a Hopper GPU.

    python -m benchmarks.kernels.fp8_decode --limit-s 90

The attention of one layer alone: ``--sequences`` decode one token each, and share nothing. Both sides run in CUDA
graphs over ``LAYERS`` layers whose caches are larger than the GPU's L2 by far. TB/s counts keys and values once, and
beside it stands what a copy reaches on this GPU, reading and writing. All variants run with the first shape, the most
promising first; then the best few of those that are right run with the others. Each case is written as soon as it is
there, with its difference from fp32 attention and FlashAttention's. One that is wrong or that the compiler refuses is
not written, and ends the command with 1.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from triton.errors import TritonError

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.timing import copy_seconds, graph_seconds
from benchmarks.kernels.attention import HEAD_DIM
from benchmarks.kernels.group_attention import LAYERS, Batch, batch_of, plain_calls
from rollout_service.engine.attention.fp8_decode import Variant, decode

RESULT = "kernels_fp8_decode"
REPEATS = 5
ROWS = 3
"""Sequences of a batch that are compared with fp32."""
SAME = ("shape", "layout", "sequences", "tokens", "page_tokens", "variant")
SHAPES = {"8 KV heads, 4 queries each": (32, 8), "8 KV heads, 8 queries each": (64, 8), "qwen3-30b-a3b": (32, 4)}
"""Query and KV heads."""
VARIANTS = (
    # one warp a program: no barriers; several programs an SM
    *(Variant(block=64, stages=stages) for stages in (3, 4, 2)),
    *(Variant(block=32, stages=stages) for stages in (4, 3, 6)),
    Variant("bits"),
    Variant(warps=2),
    Variant(block=128, warps=4),
    Variant(block=128, stages=2, warps=2),
    Variant(block=128, warps=2),
    Variant(splits=2),
    Variant(block=32, stages=4, splits=2),
    Variant(block=64, stages=5, warps=2),
    Variant(block=128, stages=2, warps=4),
    Variant("bits", block=32, stages=4),
    Variant(block=64, warps=4),
    Variant(block=16, stages=6),
    Variant(block=16, stages=8),
    Variant(splits=4),
    Variant("plain"),
)
"""In the order in which they run."""
FINALISTS = 2


class DecodeOptions(Options):
    """Sizes."""

    sequences: int = 256
    """Of a step."""
    tokens: int = 8192
    """Of a sequence, at most; up to a page less."""
    page: int = 64
    """Tokens of a page."""
    few: int = 32
    """Sequences of a smaller step, for variants that split."""
    limit_s: float = 90.0
    """No case is begun after so many seconds."""


@dataclass
class Case:
    """One variant with one batch."""

    shape: str
    layout: str
    """Whether the cache has a page's heads or its tokens first."""
    sequences: int
    tokens: int
    page_tokens: int
    variant: str
    us: float
    """Of a layer."""
    tb_per_s: float
    flash_attention_us: float
    flash_attention_tb_per_s: float
    error: float
    """Largest difference from fp32 of some rows, to their largest number."""
    flash_attention_error: float
    """Likewise."""
    lse_error: float
    """Largest difference of those rows' LSE."""

    @property
    def is_right(self) -> bool:
        """Whether it is as near to fp32 as FlashAttention is, as far as so few rows tell; NaN is not."""
        return self.error <= 0.002 + 1.5 * self.flash_attention_error and self.lse_error <= 0.02

    @property
    def ratio(self) -> float:
        """How much shorter a layer's attention is."""
        return self.flash_attention_us / self.us


class Shape:
    """One batch, with FlashAttention's figures."""

    def __init__(self, name: str, layout: str, sequences: int, tokens: int, page: int) -> None:
        """``layout``: ``heads first`` or ``tokens first``."""
        self.name, self.layout, self.tokens = name, layout, tokens
        batch = batch_of(SHAPES[name], "fp8", sequences, (1, 0, tokens), page)
        if layout == "tokens first":  # the same numbers in other places
            stored = batch.caches.view(torch.uint8).transpose(2, 3).contiguous()
            batch = Batch(
                batch.query, stored.view(torch.float8_e4m3fn).transpose(2, 3), batch.tables, batch.lengths, page
            )
        self.batch = batch
        self._bytes = int(batch.lengths.sum()) * batch.caches.shape[2] * 2 * HEAD_DIM
        self._out = torch.empty(batch.query.shape, dtype=torch.bfloat16, device="cuda")
        self._lse = torch.empty(batch.query.shape[1], sequences, device="cuda")
        self._rows = sorted({sequences * i // ROWS for i in range(ROWS)})
        self._wanted = [exact(batch, row) for row in self._rows]
        self._flash_s = statistics.median(graph_seconds(plain_calls(batch, self._out), REPEATS))
        self._flash_error = self._errors()[0]

    def measure(self, variant: Variant) -> Case:
        """One variant's figures."""
        batch, one = self.batch, torch.ones((), device="cuda")
        n, _, size = batch.query.shape
        self._out.fill_(torch.nan)
        self._lse.fill_(torch.nan)
        calls = [
            lambda keys=keys, values=values: decode(
                batch.query,
                keys,
                values,
                batch.tables,
                batch.lengths,
                (one, one, one),
                size**-0.5,
                self._out,
                self._lse,
                variant=variant,
            )
            for keys, values in batch.parts
        ]
        calls[-1]()
        error, lse_error = self._errors()
        seconds = statistics.median(graph_seconds(calls, REPEATS))
        return Case(
            self.name, self.layout, n, self.tokens, batch.page, str(variant),
            1e6 * seconds, self._bytes / seconds / 1e12, 1e6 * self._flash_s, self._bytes / self._flash_s / 1e12,
            error, self._flash_error, lse_error,
        )  # fmt: skip

    def _errors(self) -> tuple[float, float]:
        """Of the result and of its LSE, from fp32."""
        wanted = torch.stack([result for result, _ in self._wanted])
        error = (self._out[self._rows].float() - wanted).abs().max() / wanted.abs().max()
        lses = torch.stack([lse for _, lse in self._wanted], dim=1)
        return float(error), float((self._lse[:, self._rows] - lses).abs().max())


def exact(batch: Batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last layer's attention of one sequence, fp32 [heads, size], and its LSE [heads]."""
    tokens = int(batch.lengths[row])
    pages = batch.tables[row, : -(-tokens // batch.page)].long()
    keys, values = (
        part.view(torch.uint8)[pages].view(part.dtype).float().flatten(0, 1)[:tokens].transpose(0, 1)
        for part in batch.parts[-1]
    )
    logits = batch.query[row].float().view(len(keys), -1, HEAD_DIM) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
    return (logits.softmax(-1) @ values).reshape(-1, HEAD_DIM), logits.logsumexp(-1).flatten()


def cases(wanted: DecodeOptions, until: float, refused: list[str]) -> Iterator[Case]:
    """All variants with the first shape, then the best with the others, until the time is up.

    ``refused``: gets what the compiler says of those that it does not make, or that the GPU has no room for.
    """
    first, *others = SHAPES
    whole = (wanted.sequences, wanted.tokens, wanted.page)
    shape, found = Shape(first, "heads first", *whole), dict[Variant, Case]()
    for variant in VARIANTS:
        # the last quarter is for the other shapes
        if time.monotonic() > until - 0.25 * wanted.limit_s:
            break
        try:
            yield found.setdefault(variant, shape.measure(variant))
        except TritonError as error:
            refused.append(f"{variant}: {error}")
    best = sorted((v for v, case in found.items() if case.is_right), key=lambda v: found[v].us)[:FINALISTS]
    split = [Variant(v.way, v.block, v.warps, v.stages, splits) for v in best[:1] for splits in (4, 8)]
    rest = [
        *((name, "heads first", *whole, best) for name in others),
        (first, "tokens first", *whole, best),
        (first, "heads first", wanted.few, wanted.tokens, wanted.page, split),
        (first, "heads first", wanted.sequences, wanted.tokens // 8, wanted.page, best),
    ]
    for name, layout, sequences, tokens, page, variants in rest:
        if time.monotonic() > until or not variants:
            return
        del shape  # its caches
        torch.cuda.empty_cache()
        shape = Shape(name, layout, sequences, tokens, page)
        for variant in variants:
            yield shape.measure(variant)


def table_of(found: list[Case]) -> Table:
    """For people, the fastest of each batch first."""
    table = Table(title=f"decode attention to an FP8 cache on {results.machine()}")
    columns = ("shape", "layout", "sequences", "tokens", "variant", "µs", "TB/s", "FlashAttention", "ratio", "error")
    for column in columns:
        table.add_column(column, justify="left" if column in ("shape", "layout", "variant") else "right")
    batches = list(dict.fromkeys((c.shape, c.layout, c.sequences, c.tokens) for c in found))
    for c in sorted(found, key=lambda c: (batches.index((c.shape, c.layout, c.sequences, c.tokens)), c.us)):
        figures = (f"{c.us:.0f}", f"{c.tb_per_s:.2f}", f"{c.flash_attention_tb_per_s:.2f}", f"{c.ratio:.2f}")
        errors = f"{c.error:.4f} {c.flash_attention_error:.4f}"
        table.add_row(c.shape, c.layout, str(c.sequences), str(c.tokens), c.variant, *figures, errors)
    return table


def main(wanted: DecodeOptions) -> None:
    """Measure, print the table, and add each case to benchmarks/results/<machine>/kernels_fp8_decode.json."""
    console, found, until = Console(), list[Case](), time.monotonic() + wanted.limit_s
    refused: list[str] = []
    copied = 1 << 30
    copy_tb_per_s = 2 * copied / copy_seconds(copied, "cuda", REPEATS) / 1e12
    for case in cases(wanted, until, refused):
        found.append(case)
        if case.is_right:
            fresh = [asdict(case) | {"ratio": case.ratio}]
            content = {"cases": results.joined(results.cases(RESULT), fresh, SAME), "layers": LAYERS}
            results.write(RESULT, content | {"copy_tb_per_s": copy_tb_per_s})
        figures = f"{case.us:.0f} µs, {case.tb_per_s:.2f} TB/s, {case.ratio:.2f} of FlashAttention's speed"
        console.print(f"{case.shape} {case.layout} {case.sequences} x {case.tokens}, {case.variant}: {figures}")
    console.print(table_of(found))
    console.print(f"a copy: {copy_tb_per_s:.2f} TB/s; added to {results.path(RESULT)}")
    if wrong := [case for case in found if not case.is_right]:
        console.print(f"wrong results, not written: {wrong}")
    if refused:
        console.print("not compiled:", *refused, sep="\n", markup=False)
    if wrong or refused:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
