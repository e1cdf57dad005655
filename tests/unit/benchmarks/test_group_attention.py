"""Cases of the comparison: how they are named, what they need, and what is written of them."""

import asyncio
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import group_attention, headlines
from benchmarks.common.gpu_service import Mode
from benchmarks.common.shapes import Shape, write_config
from benchmarks.group_attention import Asked, Comparison, GroupOptions, Pair, ShapeOptions, asked, fits_twice, table_of
from benchmarks.group_attention_plot import draw, grid_of
from benchmarks.rollout.turns import Case as Turns
from benchmarks.rollout.turns import Sample
from rollout_service.protocol.sampling import Sampling


def test_a_case_is_named_by_its_sizes() -> None:
    assert asked("16x8x4096+512") == Asked(16, 8, 4096, 512)
    assert asked("1024:4x2x256+64") == Asked(4, 2, 256, 64, system_tokens=1024)
    assert str(asked("1024:4x2x256+64")) == "1024:4x2x256+64"
    with pytest.raises(ValueError, match=r"--case 16x8: give it as 16x16x4096\+512"):
        asked("16x8")


def test_prompts_begin_with_what_is_common_to_all() -> None:
    work = asked("10:3x2x5+8").work()
    assert len({tuple(prompt[:10]) for prompt in work.prompts}) == 1
    assert len({tuple(prompt) for prompt in work.prompts}) == 3
    assert {len(prompt) for prompt in work.prompts} == {15} and (work.n, work.out) == (2, 8)


def test_two_engines_live_beside_each_other_where_memory_holds_both(tmp_path: Path) -> None:
    path = write_config(Shape.QWEN3_8B, tmp_path / "model")
    short, long = [asked("16x16x4096+512")], [asked("16x16x1024+2048")]
    assert fits_twice(path, Mode.FP8KV, short, 85 * 10**9)
    assert not fits_twice(path, Mode.FP8KV, long, 85 * 10**9)
    assert fits_twice(path, Mode.FP8KV, long, 150 * 10**9)
    assert not fits_twice(path, Mode.BF16, short, 80 * 10**9)


def test_an_engine_just_fits_the_work() -> None:
    made = ShapeOptions(graph_step=64).settings([asked("4x32x100+50"), asked("1000:2x2x9+7")])
    assert (made["max_num_seqs"], made["max_model_len"]) == (128, 1024)
    assert made["cuda_graph_sizes"] == [1, 2, 4, 8, 64, 128]


def pair(name: str) -> Pair:
    return Pair(asked(name), {side: Turns("m", "fp8kv", side, None) for side in group_attention.SIDES})


def test_a_case_says_what_was_gained() -> None:
    """A step of 20 ms and one of 10, with 0.1 s besides on either side."""
    both = pair("2x4x100+80")
    assert not both.is_whole
    for side, step_s in {"baseline": 0.020, "group": 0.010}.items():
        sample = Sample(seconds=0.1 + 80 * step_s, short_s=0.1 + 10 * step_s, tokens=80, cores={}, gpu={})
        both.turns[side].add(sample, 2 * 4 * 80)
    assert both.is_whole
    case = both.as_json()
    assert (case["groups"], case["n"], case["prompt_tokens"], case["output_tokens"]) == (2, 4, 100, 80)
    assert (case["step_ms"], case["baseline_step_ms"]) == (pytest.approx(10.0), pytest.approx(20.0))
    assert case["step_ratio"] == pytest.approx(2.0) and case["ratio"] == pytest.approx(1.7 / 0.9)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of([case]))
    [line] = [line for line in captured.get().splitlines() if "fp8kv" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[-4:] == ["1.89", "10.00", "20.00", "2.00"]


def test_no_run_is_begun_that_would_not_end_in_time() -> None:
    """A first case that took 10 s, one ten times as long, and one as long as the first; 60 s are left."""
    now = 0.0
    pairs = [pair(name) for name in ("1x1x4+100", "1x1x4+1000", "1x1x8+100")]
    comparison = Comparison(GroupOptions(), pairs, {}, 60.0, Console(quiet=True), clock=lambda: now)
    begun = []
    for each in comparison.affordable(2):
        begun.append(str(each.asked))
        now += 10.0
        each.seconds = 10.0
    assert begun == ["1x1x4+100", "1x1x8+100"]


async def test_a_run_that_is_not_over_in_time_is_given_up_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr(group_attention.results, "write", lambda *content: written.append(content))
    given_up = asyncio.Event()

    async def never(prompt: list[int], sampling: Sampling) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    one = pair("1x1x4+100")
    for turn in one.turns.values():
        turn.rates.clear()
    comparison = Comparison(GroupOptions(), [one], {}, 0.05, Console(quiet=True), clock=lambda: 0.0)
    await comparison._run(one, {"baseline": never, "group": never})
    assert given_up.is_set() and not one.is_whole and not written


def test_the_headline_has_the_least_and_the_most_that_was_gained() -> None:
    common = {"model": "m", "mode": "bf16", "groups": 2, "n": 4, "output_tokens": 8}
    cases = [
        common | {"ratio": ratio, "system_tokens": system, "prompt_tokens": 16}
        for ratio, system in ((1.5, 0), (0.99, 32), (2.25, 0))
    ]
    said = headlines.group_attention({"cases": cases})
    assert said.endswith("0.99 (m, bf16, 2 × 4 × (32 + 16 + 8)) to 2.25 (m, bf16, 2 × 4 × (16 + 8))")
    kernels = [{"ratio": 0.98, "grouping_us": 21.4}, {"ratio": 4.2, "grouping_us": 30.0}]
    assert "0.98 to 4.20 times as fast; the grouping takes up to 30 µs" in headlines.grouped_kernels({"cases": kernels})


def test_the_picture_leaves_open_what_was_not_measured(tmp_path: Path) -> None:
    sizes = {(16, 1024): 2.0, (16, 4096): 4.0, (4, 4096): 2.5}
    alike = {"model": "qwen3-8b", "kv": "fp8", "own_tokens": 512}
    cases = [alike | {"group": g, "prompt_tokens": p, "ratio": r} for (g, p), r in sizes.items()]
    others = [alike | {"own_tokens": 2048, "group": 8, "prompt_tokens": 512, "ratio": 9.0}]
    prompts, groups, ratios = grid_of([*cases, *others])
    assert (prompts, groups) == ([1024, 4096], [4, 16])
    assert math.isnan(ratios[0][0]) and ratios[0][1] == 2.5 and ratios[1] == [2.0, 4.0]
    one = {"model": "m", "groups": 2, "n": 2, "system_tokens": 0, "prompt_tokens": 8, "output_tokens": 8}
    draw(cases, [one | {"ratio": 1.5, "step_ratio": 2.0}], tmp_path / "picture.png", "h200")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
