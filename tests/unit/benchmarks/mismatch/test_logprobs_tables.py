"""docs/numerics.md has the figures of the results."""

from benchmarks.mismatch.logprobs_tables import PAGE, page, table


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.mismatch.logprobs_tables"


def test_an_engine_has_one_line_for_all_models() -> None:
    cases = [
        {"model": "qwen3_moe", "engine": "bf16", "k3": 2.24e-6, "abs_diff_max": 0.091},
        {"model": "qwen3", "engine": "bf16", "k3": 3.84e-6, "abs_diff_max": 0.1},
        {"model": "qwen3", "engine": "fp8_block, fake_quant trainer", "k3": 0.0, "abs_diff_max": 0.0},
    ]
    assert table(cases).splitlines()[2:] == [
        "| bf16 | 3.8e-06 | 0.10 | 2.2e-06 | 0.09 |",
        "| fp8_block, fake_quant trainer | 0 | 0.00 |  |  |",
    ]
