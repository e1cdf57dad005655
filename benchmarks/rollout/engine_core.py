"""What vLLM's own process does while it decodes: where the CPU's time of a step goes, function by function; on a GPU.

    python -m benchmarks.rollout.engine_core --model qwen3-8b --limit-s 120
    python -m benchmarks.rollout.engine_core --attention FLASH_ATTN --vllm stream_interval=8

A bare engine with random weights of a published shape, and one kind of work, as in ``benchmarks.group_attention``. All
Python processes write down every five milliseconds what each thread is doing (``benchmarks/common/stacks.py``);
shown is the second part of a run, in which all sequences decode. *within*: share of the samples in which a function or
one that it called ran; *itself*: those in which it ran, or something that is not Python, such as a launch. Samples cost
time themselves: tokens/s are for comparison with each other alone.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine
from benchmarks.common.gpu_service import ENGINES_SHARE, Mode, settings_of
from benchmarks.common.results import Json
from benchmarks.common.shapes import write_config
from benchmarks.common.stacks import Profile, profiles, sampled
from benchmarks.group_attention import Asked, ShapeOptions, asked
from benchmarks.rollout.turns import SHORT, Case, take_turns
from rollout_service.config import ServiceConfig

RESULT = "rollout_engine_core"
SAME = ("model", "mode", "attention", "case", "vllm", "layers")
VLLM = "VLLM::"
"""In the titles that vLLM gives its processes: its core and, of several GPUs or on the CPU, workers."""
SHOWN = 40
LEAST = 0.01
"""Share of a thread's samples below which a function is not written down."""


class CoreOptions(Options):
    """What is sampled."""

    mode: Mode = Mode.FP8KV
    """What is in FP8: bf16, fp8 (weights) or fp8kv (weights and KV cache)."""
    case: str = "16x16x4096+512"
    """Groups x completions x prompt + output."""
    attention: str = "group"
    """engine.attention_backend."""
    vllm: tuple[str, ...] = ()
    """Arguments of vLLM in place of the service's, name=JSON; may be repeated."""
    limit_s: float = 120.0
    """Nothing is run that begins later."""


def arguments(given: tuple[str, ...]) -> dict[str, object]:
    """Of vLLM. Raises ValueError for one that is no name with a value of JSON."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ValueError(f"--vllm {each}: give it as name=value")
        found[name] = json.loads(value)
    return found


async def decoded(config: ServiceConfig, work: Asked, options: CoreOptions, turns: Case, until: float) -> list[float]:
    """Run the work; returns when it decoded, from and to, by ``time.monotonic``. Raises TimeoutError."""
    started = time.monotonic()
    async with bare_engine(config, arguments=arguments(options.vllm)) as engine:
        turns.start_s = time.monotonic() - started
        await engine.label(0)
        if time.monotonic() > until:
            raise TimeoutError(f"the engine took {turns.start_s:.0f} s to start, and --limit-s is {options.limit_s}")
        numbers = iter(range(1 << 30))
        sides = {"one": lambda prompt, how: engine.generate(f"{next(numbers)}", tuple(prompt), how)}
        await take_turns(work.work(), 1, sides, {"one": turns})
        ended = time.monotonic()
    [sample] = turns.samples
    return [ended - sample.seconds + sample.short_s, ended]


def case_of(turns: Case, found: dict[tuple[str, str], Profile]) -> Json:
    """Figures, and each thread's functions of vLLM's process and of ours."""
    threads = []
    for (process, thread), profile in sorted(found.items(), key=lambda item: -item[1].samples):
        if VLLM in process or thread == "MainThread":
            named = {"within": profile.within(), "itself": profile.innermost()}
            kept = {kind: {n: share for n, share in all_.items() if share >= LEAST} for kind, all_ in named.items()}
            threads.append({"process": process[:80], "thread": thread, "samples": profile.samples, **kept})
    return {
        "tokens_per_s": turns.rates[0],
        "step_ms": turns.step_ms[0],
        "cores": turns.samples[0].cores,
        "start_s": turns.start_s,
        "threads": threads,
    }


def tables(case: Json) -> list[Table]:
    """Of the threads of vLLM's processes, for people."""
    made = []
    for thread in case["threads"]:
        if VLLM not in thread["process"]:
            continue
        title = f"{thread['process']}, {thread['thread']}, {thread['samples']} samples"
        table = Table("within", "itself", "function", title=title)
        for name, share in list(thread["within"].items())[:SHOWN]:
            table.add_row(f"{share:.1%}", f"{thread['itself'].get(name, 0.0):.1%}", name)
        made.append(table)
    return made


def main(shape: ShapeOptions, options: CoreOptions) -> None:
    """Measure, print the tables, and add the case to benchmarks/results/<machine>/rollout_engine_core.json."""
    until, work, console = time.monotonic() + options.limit_s, asked(options.case), Console()
    arguments(options.vllm)
    turns = Case(shape.model, options.mode, options.attention, None)
    with tempfile.TemporaryDirectory(dir=shape.folder) as temporary:
        path = write_config(shape.model, Path(temporary) / shape.model, shape.layers)
        engine: dict[str, Any] = {"attention_backend": options.attention, "gpu_memory_utilization": ENGINES_SHARE}
        settings = settings_of(options.mode, path, path.parent / "engine", shape.settings([work]) | engine)
        samples = Path(temporary) / "samples"
        samples.mkdir()
        with sampled(samples):
            config = ServiceConfig.model_validate(settings)
            begin, end = asyncio.run(decoded(config, work, options, turns, until))
        case = case_of(turns, profiles(samples, begin, end))
    said = {
        "model": shape.model, "mode": options.mode, "attention": options.attention, "case": options.case,
        "vllm": list(options.vllm), "layers": shape.layers, "short_run": f"1/{SHORT}",
    }  # fmt: skip
    results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [said | case], SAME)})
    for table in tables(case):
        console.print(table)
    console.print(f"{case['tokens_per_s']:.0f} tokens/s, {case['step_ms']:.2f} ms a step, cores {case['cores']}")
    console.print(f"added to {results.path(RESULT)}")


if __name__ == "__main__":
    run(main)
