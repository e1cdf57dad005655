"""Cases of the attention's comparison, and its table."""

import pytest
from rich.console import Console

from benchmarks.kernels.group_attention import Case, GroupOptions, table_of

SIZES = ("qwen3-8b", "fp8", 256, 16, 4096, 512, 64, 8, "fp8_decode")
FIGURES = (800.0, 200.0, 12.0, 30.0, 90.0, 0.01)


def test_a_case_is_named_by_its_sizes() -> None:
    assert GroupOptions(case=("16x4096+512", "1x64+8")).sizes() == [(16, 4096, 512), (1, 64, 8)]
    with pytest.raises(ValueError, match=r"--case 16x4096: give it as 16x4096\+512"):
        GroupOptions(case=("1x64+8", "16x4096")).sizes()


def test_a_result_far_from_fp32_is_no_result() -> None:
    assert Case(*SIZES, *FIGURES, 0.011).is_right
    assert not Case(*SIZES, *FIGURES, 0.2).is_right
    assert not Case(*SIZES, *FIGURES, float("nan")).is_right


def test_a_line_of_the_table_has_both_sides_and_the_gain() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of([Case(*SIZES, *FIGURES, 0.011)]))
    [line] = [line for line in captured.get().splitlines() if "qwen3-8b" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:6] == ["qwen3-8b", "fp8", "64", "16", "4096", "512"]
    assert cells[6:] == ["800.0", "200.0", "4.00", "12.0", "30", "90", "0.0100 0.0110"]
