"""The table of matrix products."""

import pytest
from rich.console import Console

from benchmarks.kernels.linear import Case, table_of


def test_a_line_of_the_table_has_every_kernel_and_the_gain() -> None:
    shape = ("qwen3-8b", "o", 4096, 4096, 256)
    cases = [
        Case(*shape, "bf16", [20e-6]),
        Case(*shape, "cutlass", [16e-6, 18e-6, 30e-6]),
        Case(*shape, "deep_gemm", [9e-6]),
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of(cases))
    [line] = [line for line in captured.get().splitlines() if "qwen3-8b" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")][3:] == ["256", "20.0", "18.0", "9.0", "", "0.50"]


def test_a_kernel_that_was_refused_has_no_figure() -> None:
    cases = [
        Case("qwen3-8b", "o", 4096, 4096, 256, "cutlass", [18e-6]),
        Case("qwen3-8b", "o", 4096, 4096, 256, "deep_gemm", refused="no compiler"),
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of(cases))
    [line] = [line for line in captured.get().splitlines() if "qwen3-8b" in line]
    assert line.strip("│").split("│")[-1].strip() == "nan"


def test_operations_are_counted_as_two_for_each_weight_and_token() -> None:
    assert Case("m", "l", 1000, 1000, 1000, "bf16", [1e-3]).tflops == pytest.approx(2.0)
