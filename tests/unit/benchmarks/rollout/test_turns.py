"""Two lengths tell what a step costs and what a request costs; sides take turns."""

import asyncio
from dataclasses import dataclass

import pytest

from benchmarks.common.work import WorkOptions
from benchmarks.rollout.machine_watch import GpuWatch, cpu_seconds
from benchmarks.rollout.turns import Case, Sample, take_turns
from rollout_service.protocol.sampling import Sampling


@dataclass(frozen=True)
class Completed:
    token_ids: tuple[int, ...]


def made(how: Sampling) -> list[Completed]:
    return how.n * [Completed((7,) * how.max_tokens)]


def test_two_lengths_tell_what_a_step_takes_and_the_rest() -> None:
    sample = Sample(seconds=0.5 + 512 * 0.010, short_s=0.5 + 64 * 0.010, tokens=512, cores={}, gpu={})
    assert sample.step_ms == pytest.approx(10.0)
    assert sample.fixed_s == pytest.approx(0.5)


async def test_sides_take_turns_with_new_prompts_each_time() -> None:
    work = WorkOptions(groups=2, n=3, prompt_min=4, prompt_max=8, out=16).make()
    asked: list[tuple[str, int]] = []
    prompts: list[tuple[int, ...]] = []

    async def generate(side: str, prompt: list[int], how: Sampling) -> list[Completed]:
        asked.append((side, how.max_tokens))
        prompts.append(tuple(prompt))
        await asyncio.sleep(0)
        return made(how)

    cases = {side: Case("model", "fp8", side, None) for side in "ab"}
    ways = {"a": lambda p, how: generate("a", p, how), "b": lambda p, how: generate("b", p, how)}
    await take_turns(work, 2, ways, cases)
    turn = [("a", 2), ("a", 2), ("a", 16), ("a", 16), ("b", 2), ("b", 2), ("b", 16), ("b", 16)]
    assert asked == 3 * turn
    assert len(set(prompts)) == len(prompts) == 24
    assert [len(case.rates) for case in cases.values()] == [2, 2]
    found = cases["a"].as_json()
    assert found["tokens_per_s"] == pytest.approx(sum(cases["a"].rates) / 2)
    assert found["samples"][0]["tokens"] == 16


async def test_work_that_is_done_once_is_noted_the_first_time() -> None:
    work = WorkOptions(groups=1, n=1, prompt_min=4, prompt_max=4, out=8).make()
    case = Case("model", "fp8", "bare", None)

    async def generate(_: list[int], how: Sampling) -> list[Completed]:
        return made(how)

    await take_turns(work, 1, {"bare": generate}, {"bare": case})
    assert len(case.samples) == 1


async def test_a_run_that_was_cut_short_is_no_sample() -> None:
    work = WorkOptions(groups=2, n=2, prompt_min=4, prompt_max=4, out=8).make()
    case = Case("model", "fp8", "bare", None)

    async def generate(_: list[int], how: Sampling) -> list[Completed]:
        return [*made(how)[1:], Completed((7,) * (how.max_tokens - 1))]

    with pytest.raises(RuntimeError, match="2 tokens were made, and not 4"):
        await take_turns(work, 1, {"bare": generate}, {"bare": case})
    assert case.samples == []


def test_a_gpus_samples_are_medians_since_the_last_look() -> None:
    watch = GpuWatch()
    watch.read(iter(["1980, 650.2\n", "1755, 699.0\n", "[N/A], [N/A]\n", "1200, 100.0\n"]))
    assert watch.take() == {"sm_mhz": 1755.0, "power_w": 650.2}
    assert watch.take() == {}


def test_this_process_is_the_caller() -> None:
    assert cpu_seconds()["caller"] > 0
