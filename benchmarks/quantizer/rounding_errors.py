"""Measure the rounding errors of FP8 for weights of several kinds. Writes a table and the plot of docs/numerics.md.

python -m benchmarks.quantizer.rounding_errors
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from benchmarks.common.marked import markdown_table, write_part
from benchmarks.common.paths import PROJECT
from rollout_service.quant.blockwise import AMAX_FLOOR, CODES, E4M3_MAX, dequantize_blockwise, quantize_blockwise

DOCS = PROJECT / "docs"
SHAPE = (2048, 2048)
OUTLIER_SHARE = 1e-5
PART = "python -m benchmarks.quantizer.rounding_errors"


def gaussian(generator: torch.Generator) -> torch.Tensor:
    """Weights as they are initialized."""
    return torch.randn(SHAPE, generator=generator) * 0.02


def heavy_tailed(generator: torch.Generator) -> torch.Tensor:
    """Student's t with 3 degrees of freedom: normal over the root of a chi-square."""
    chi_square = torch.randn(3, *SHAPE, generator=generator).square().sum(0) / 3
    return gaussian(generator) / chi_square.sqrt()


def single_outliers(generator: torch.Generator) -> torch.Tensor:
    """One weight in 100 000 is 500 times too large."""
    weight = gaussian(generator)
    return torch.where(torch.rand(SHAPE, generator=generator) < OUTLIER_SHARE, 500 * weight, weight)


def outlier_inputs(generator: torch.Generator) -> torch.Tensor:
    """One input channel in 256 is 100 times larger in all outputs, as in down projections after training."""
    weight = gaussian(generator)
    weight[:, ::256] *= 100
    return weight


def uneven_rows(generator: torch.Generator) -> torch.Tensor:
    """Output channels whose norms spread over four decades."""
    return gaussian(generator) * 10 ** (4 * torch.rand(SHAPE[0], 1, generator=generator) - 4)


KINDS = {
    "Gaussian": gaussian,
    "heavy tails (Student t, 3 d.o.f.)": heavy_tailed,
    "single outliers (1 in 10⁵, ×500)": single_outliers,
    "outlier input channels (1 in 256, ×100)": outlier_inputs,
    "uneven output channels (4 decades)": uneven_rows,
}


def by_scale(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """``weight`` through E4M3 with the scales of ``amax``, which broadcasts."""
    scale = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    return (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(CODES).float() * scale


SCHEMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "128×128 blocks": lambda w: dequantize_blockwise(*quantize_blockwise(w)),
    "blocks, power-of-two scales": lambda w: dequantize_blockwise(*quantize_blockwise(w, power_of_two=True)),
    "per output channel": lambda w: by_scale(w, w.abs().amax(1, keepdim=True)),
    "per tensor": lambda w: by_scale(w, w.abs().amax()),
}

Errors = dict[str, float]


def errors(weight: torch.Tensor, restored: torch.Tensor) -> Errors:
    """Relative Frobenius error of all weights and of their smaller half; the largest; the share that became zero."""
    weight, error = weight.double(), (restored.double() - weight.double()).abs()
    small = weight.abs() < weight.abs().median()
    return {
        "frobenius": float(error.norm() / weight.norm()),
        "small": float(error[small].norm() / weight[small].norm()),
        "max": float(error.max() / weight.square().mean().sqrt()),
        "zeros": float(((restored == 0) & (weight != 0)).double().mean()),
    }


def measure() -> dict[str, dict[str, Errors]]:
    """kind → scheme → errors, always of the BF16 weight."""
    table: dict[str, dict[str, Errors]] = {}
    for kind, make in KINDS.items():
        weight = make(torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
        table[kind] = {scheme: errors(weight, restore(weight)) for scheme, restore in SCHEMES.items()}
    return table


def markdown(table: dict[str, dict[str, Errors]]) -> str:
    """For the page."""
    rows = []
    for kind, schemes in table.items():
        for scheme, e in schemes.items():
            cells = (
                kind,
                scheme,
                f"{e['frobenius']:.2%}",
                f"{e['small']:.2%}",
                f"{e['max']:.2g}",
                f"{e['zeros']:.2%}",
            )
            rows.append(cells)
            kind = ""
    heading = ("weights", "scales", "relative Frobenius", "of the smaller half", "max, in rms", "became zero")
    return markdown_table(heading, rows)


def error_beside_outliers(factor: float) -> dict[str, float]:
    """scheme → relative Frobenius error of the Gaussian weights among outliers ``factor`` times too large."""
    generator = torch.Generator().manual_seed(0)
    weight = gaussian(generator)
    outlier = torch.rand(SHAPE, generator=generator) < OUTLIER_SHARE
    weight = torch.where(outlier, factor * weight, weight).to(torch.bfloat16).float()
    others = ~outlier
    return {
        scheme: float((restore(weight) - weight)[others].norm() / weight[others].norm())
        for scheme, restore in SCHEMES.items()
    }


def plot(path: Path) -> None:
    """What outliers cost the weights beside them, and why: the error of a weight against its size in its block."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    factors = torch.logspace(0, 7, 29).tolist()
    curves = [error_beside_outliers(factor) for factor in factors]
    for scheme in SCHEMES:
        left.loglog(factors, [curve[scheme] for curve in curves], label=scheme, marker=".")
    left.set_xlabel("size of 1 weight in 100 000, against the others")
    left.set_ylabel("relative Frobenius error of the others")
    left.legend(fontsize=8)
    size = torch.logspace(-7, 0, 4000)
    relative = (by_scale(size, torch.tensor(1.0)) - size).abs() / size
    right.loglog(size, relative, linewidth=0.5)
    right.axvline(2.0**-6 / E4M3_MAX, color="gray", linestyle=":")
    right.annotate(" E4M3 is subnormal below", (2.0**-6 / E4M3_MAX, 0.4), fontsize=8)
    right.set_xlabel("|w| / largest |w| that shares its scale")
    right.set_ylabel("relative error")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, and write the table and the plot."""
    table = measure()
    plot(DOCS / "numerics.png")
    write_part(DOCS / "numerics.md", PART, markdown(table))


if __name__ == "__main__":
    main()
