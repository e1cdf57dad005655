"""The time of a decode step by the clock, by its kernels and by the GPU's limits, with one or several engine settings.

    python -m benchmarks.rollout.decode_step --prompt-min 4096 --prompt-max 4096
    python -m benchmarks.rollout.decode_step --tried "distributed_executor_backend=mp" --tried "async_scheduling=false"

Each ``--tried`` is a bare engine with random weights whose settings differ from the service's in what it names:
``argument=value`` of vLLM's AsyncEngineArgs, ``engine.setting=value`` of this service, or ``env.VARIABLE=value``, with
values in YAML, several joined by ``;``. The engine without differences is measured first. Engines run one after another
in processes of their own. ``compilation_config={}`` leaves out the kernels of ``rollout_service/engine/kernels``.

For each engine: tokens/s; a step by the clock, from a short and a whole run; its kernels by kind, recorded over 20
steps about the middle of a run; and the roofline of the same tokens (``benchmarks/rollout/roofline.py``). An engine
that fails or exceeds its time has an ``error`` instead.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine
from benchmarks.common.gpu_service import EngineOptions, Mode, ModelOptions, fitting, settings_of
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.step_profile import prepare, profiler_into, record
from benchmarks.common.work import SHORT, Work, WorkOptions, sampled
from benchmarks.rollout.roofline import GpuLimits, gpu_limits, roofline
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.model.served_model import ServedModel

RESULT = "rollout_decode_step"
SAME = ("model", "mode", "work", "engine", "tried")
_WARM_UP_TOKENS = 16
STEPS = 20  # recorded of each engine


class StepOptions(Options):
    """What is compared."""

    tried: tuple[str, ...] = ()
    """Settings of a further engine: ``argument=value; engine.setting=value; env.VARIABLE=value``. May be repeated."""
    repeats: int = 2
    """Runs of each engine by the clock."""
    limit_s: float = 480.0
    """Longest start and measurement of an engine."""


@dataclass(frozen=True)
class Trial:
    """One engine."""

    tried: str  # how its settings differ
    settings: dict[str, Any]  # the service's configuration
    arguments: dict[str, Any]  # arguments of vLLM that replace the service's
    work: Work
    options: StepOptions
    folder: Path  # for traces


def differences(tried: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return the service's engine settings, environment variables and vLLM's arguments that ``--tried`` names."""
    engine, env, arguments = dict[str, Any](), dict[str, str](), dict[str, Any]()
    for part in filter(None, map(str.strip, tried.split(";"))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--tried {tried!r}: {part!r} has no value; give name=value")
        if name.startswith("env."):
            env[name.removeprefix("env.")] = value
        elif name.startswith("engine."):
            engine[name.removeprefix("engine.")] = yaml.safe_load(value)
        else:
            arguments[name] = yaml.safe_load(value)
    return engine, env, arguments


def measure_apart(trial: Trial) -> Json:
    """Measure an engine in a process of its own; return its figures, or its ``error``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_start_and_measure, args=(theirs, trial))
    process.start()
    theirs.close()  # or the end of the other process would not be noticed
    try:
        if not ours.poll(trial.options.limit_s):
            return {"error": f"no answer in {trial.options.limit_s:.0f} s"}
        found: Json = ours.recv()
        process.join(30)  # it ends its engine
    except EOFError:
        return {"error": "its process has ended; stderr has the error"}
    finally:
        process.terminate()
        process.join(30)
        process.kill()
        process.join()
    return found


def _start_and_measure(connection: Connection, trial: Trial) -> None:
    async def measure() -> None:
        began = time.monotonic()
        arguments = trial.arguments | {"profiler_config": profiler_into(trial.folder)}
        async with bare_engine(ServiceConfig.model_validate(trial.settings), arguments=arguments) as engine:
            await engine.label(0)  # the dummy weights' label is no version
            await _generate(engine, trial.work, _WARM_UP_TOKENS)
            start = {"start_s": time.monotonic() - began, "kv_tokens": engine.kv_cache_tokens}
            print(f"{trial.tried or 'as shipped'}: {start}", flush=True)
            connection.send(start | await _measure(engine, trial))

    asyncio.run(measure())


async def _measure(engine: EngineAdapter, trial: Trial) -> Json:
    samples = [
        await sampled(
            trial.work,
            lambda prompt, how: engine.generate(uuid.uuid4().hex, tuple(prompt), how),
            str(repeat + 1),
        )
        for repeat in range(trial.options.repeats)
    ]
    return {
        "tokens_per_s": statistics.median(trial.work.tokens / sample.seconds for sample in samples),
        "step_ms": statistics.median(sample.step_ms for sample in samples),
        "samples": [asdict(sample) for sample in samples],
        "profile": await _profile(engine, trial),
    }


async def _profile(engine: EngineAdapter, trial: Trial) -> Json:
    """Record steps about the middle of the steps that ``Sample.step_ms`` is about."""
    work, sequences = trial.work, len(trial.work.prompts) * trial.work.n
    block: int = engine._llm.vllm_config.cache_config.block_size

    def own() -> float:
        pages = engine.scheduler.load(sequences, 0).kv_cache_usage * engine.kv_cache_tokens / block
        return own_tokens(pages, [len(prompt) for prompt in work.prompts], sequences, block)

    await prepare(engine)  # after the runs by the clock, which it could slow down
    running = asyncio.create_task(_generate(engine, work, work.out))
    try:
        while own() < middle(work.out) - STEPS / 2 and not running.done():
            await asyncio.sleep(0.005)
        found = await record(engine, STEPS, trial.folder, seconds=60)
        return found | {"own_tokens_at_end": own()}
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def own_tokens(pages: float, prompts: list[int], sequences: int, block: int) -> float:
    """Return a sequence's mean tokens beyond its prompt, from the used pages of the KV cache."""
    shared = [(length - 1) // block for length in prompts]
    rest = sum(length - block * full for length, full in zip(prompts, shared, strict=True)) / len(prompts)
    return block * (pages - sum(shared)) / sequences - block / 2 - rest


async def _generate(engine: EngineAdapter, work: Work, tokens: int) -> None:
    how = work.sampling.model_copy(update={"max_tokens": tokens})
    async with asyncio.TaskGroup() as tasks:
        for prompt in work.prompts:
            tasks.create_task(engine.generate(uuid.uuid4().hex, tuple(prompt), how))


def middle(tokens: int) -> float:
    """Return a sequence's mean tokens over the steps that ``Sample.step_ms`` is about."""
    return (tokens // SHORT + tokens) / 2


def compare(found: Json, limits: GpuLimits, model: ServedModel, work: WorkOptions) -> Json:
    """Return the figures with the roofline, the share of it, and the clock's time by the kernels'."""
    if "error" in found:
        return found
    least = roofline(model, Mode.FP8KV, work, middle(work.out), limits)
    return found | {
        "clock_by_kernels": found["step_ms"] / found["profile"]["kernels_ms"],
        "limits": asdict(limits),
        "roofline": least,
        "share_of_roofline": least["limit_ms"] / found["step_ms"],
    }


def main(model: ModelOptions, options: StepOptions, work: WorkOptions, engine: EngineOptions) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/rollout_decode_step.json."""
    tried = {each: differences(each) for each in ("", *options.tried)}
    limits = gpu_limits()
    base = fitting(work) | engine.settings(work.sequences)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write_config(Shape(model.model), folder / model.model)
        common: Json = {"model": path.name, "mode": Mode.FP8KV}
        common |= {"work": work.as_json(), "engine": base}
        served = ServedModel.load(path)
        for number, (each, (own, env, arguments)) in enumerate(tried.items()):
            (traces := folder / f"traces-{number}").mkdir()
            settings = settings_of(Mode.FP8KV, path, folder, base | {"env": env} | own)
            measured = measure_apart(Trial(each, settings, arguments, work.make(), options, traces))
            case = common | {"tried": each} | compare(measured, limits, served, work)
            results.add(RESULT, [case], SAME)


if __name__ == "__main__":
    run(main)
