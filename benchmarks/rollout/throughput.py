"""Tokens/s of the service, through HTTP and through its handle, against the bare vLLM engine inside; on a GPU.

    python -m benchmarks.rollout.throughput --model qwen3-8b --mode fp8kv --side bare --side handle --side http
    python -m benchmarks.rollout.throughput --mode bf16 --mode fp8kv --side bare --envelope-gb 80 --groups 256 --n 1

Random weights of published shapes. All sides have the engine arguments that the service makes of one configuration, and
the same prompts: ``--groups`` distinct ones with ``--n`` completions each, all at once, temperature 1, no end of
sequence. ``--envelope-gb`` is all the GPU memory that an engine may use. Modes: ``bf16``, ``fp8`` (weights), ``fp8kv``
(weights and KV cache). The service's engine and the bare one live side by side and take turns: what drifts on a host
drifts for both. The bare one gets the version that the service serves; alone it runs on vLLM's dummy weights. Before
each run comes one with an eighth of the tokens: two lengths tell what a step takes and what does not depend on them.
``--door``: then updates through the same service, as ``benchmarks.update.live``. Each call adds its cases to the same
file, which says what they are to each other.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.gpu_service import (
    ENGINES_SHARE,
    FREE_HELP,
    graph_sizes,
    remove_weights,
    serving,
    settings_of,
    write_weights,
)
from benchmarks.common.rollout_work import Case, Generate, Work, make_work
from benchmarks.common.shapes import write_config
from benchmarks.rollout.throughput_results import earlier_cases, joined, ratios
from benchmarks.update.live import Case as UpdateCase
from benchmarks.update.live import Updates
from benchmarks.update.live import table_of as table_of_updates
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment, not_converted
from rollout_service.engine.plugin import register
from rollout_service.local import APPLICATION
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.store.log import WeightLog

SIDES = ("bare", "handle", "http")


@asynccontextmanager
async def bare_engine(config: ServiceConfig, case: Case) -> AsyncIterator[Generate]:
    """The engine alone, with the version that the service has left in the log, or with dummy weights."""
    os.environ.update(engine_environment(config))  # noqa: TID251 - the engine's parent is this process
    register()
    model, started = ServedModel.load(config.model.path), time.perf_counter()
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    engine = EngineAdapter(args, exports=False)
    try:
        await engine.connect()
        case.start_s = time.perf_counter() - started
        await load_version(engine, WeightLog(config.weights.root_here()))
        case.kv_tokens = engine.kv_cache_tokens
        yield lambda prompt, how: engine.generate(uuid.uuid4().hex, tuple(prompt), how)
    finally:
        engine.shutdown()


async def alone(config: ServiceConfig, work: Work, case: Case) -> None:
    """The bare engine, no service."""
    async with bare_engine(config, case) as generate:
        await work.measure({"bare": generate}, {"bare": case})


async def load_version(engine: EngineAdapter, log: WeightLog) -> None:
    """The newest one, if there is any."""
    head = log.head()
    if head is None:
        await engine.label(0)  # the dummy weights' label is no version
        return
    await engine.stage(log.folder(head.version))
    await engine.pause("keep")
    await engine.load(log.folder(head.version), head.version)
    await engine.resume()


async def through_the_service(
    url: str, config: ServiceConfig, work: Work, cases: dict[str, Case], bare: dict[str, Any]
) -> None:
    """Over HTTP with the client, and through the engine's handle, as the gateway uses it, in this process.

    A bare engine among the cases lives beside the service's and takes turns with it. ``bare``: what else it is told.
    """
    from ray import serve

    from rollout_service.fleet.dispatch import Dispatcher

    handles = [serve.get_deployment_handle(name, APPLICATION) for name in ("engine", "ingest")]
    dispatcher = Dispatcher(*handles, config.engine)

    def by_handle(prompt: list[int], how: Sampling) -> Awaitable[object]:
        call = GenerateCall(request_id=uuid.uuid4().hex, prompt_token_ids=tuple(prompt), sampling=how)
        return dispatcher.complete(call)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(RolloutClient(url))

        def by_http(prompt: list[int], how: Sampling) -> Awaitable[object]:
            return client.generate(prompt, **how.model_dump(include={"n", "max_tokens", "ignore_eos"}))

        ways: dict[str, Generate] = {"handle": by_handle, "http": by_http}
        if "bare" in cases:
            its = config.model_copy(update={"engine": config.engine.model_copy(update=bare)})
            ways["bare"] = await stack.enter_async_context(bare_engine(its, cases["bare"]))
        await work.measure({side: ways[side] for side in cases}, cases)


def served(
    settings: dict[str, Any],
    work: Work,
    cases: dict[str, Case],
    bare: dict[str, Any],
    folder: Path,
    verbose: bool,
    updates: Updates | None,
    keep: Callable[[], None],
    spare: Path | None,
) -> None:
    """The whole service: rollouts, then updates. ``keep``: called in between. ``spare``: its weights are removed."""
    started = time.perf_counter()
    with serving(settings, folder, verbose) as service:
        start_s = time.perf_counter() - started
        if spare is not None:
            remove_weights(spare)
        for side in cases.keys() - {"bare"}:
            cases[side].start_s = start_s
        asyncio.run(through_the_service(service.url, service.config, work, cases, bare))
        keep()
        if updates is not None:
            asyncio.run(updates.measure(service.url))


def table_of(cases: list[Case]) -> Table:
    """For people; ratios are to the first line."""
    table = Table(title=f"rollout on {results.machine()}")
    numbers = ("GB", "start, s", "KV cache, tokens", "tokens/s", "ratio", "a step, ms", "besides, s")
    for column in ("model", "mode", "side", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    first = statistics.median(cases[0].rates)
    for c in cases:
        rate = statistics.median(c.rates)
        sizes = (f"{c.envelope_gb or 0:.0f}", f"{c.start_s:.0f}", str(c.kv_tokens or ""))
        parts = (f"{statistics.median(c.step_ms):.2f}", f"{statistics.median(c.fixed_s):.2f}")
        table.add_row(c.model, c.mode, c.side, *sizes, f"{rate:.0f}", f"{rate / first:.3f}", *parts)
    return table


def main(
    model: str = "qwen3-8b",
    mode: Annotated[list[str] | None, typer.Option(help="bf16, fp8 or fp8kv; may be repeated.")] = None,
    side: Annotated[list[str] | None, typer.Option(help="bare, handle or http; may be repeated.")] = None,
    groups: int = 16,
    n: int = 16,
    prompt_min: int = 512,
    prompt_max: int = 512,
    out: int = 512,
    repeats: int = 3,
    envelope_gb: float | None = None,
    linear: Annotated[str, typer.Option(help="vLLM's linear_backend for FP8.")] = "cutlass",
    attention: str = "auto",
    block_size: int | None = None,
    batched_tokens: Annotated[int | None, typer.Option(help="Of a step; vLLM's own choice if not given.")] = None,
    graph_step: Annotated[int | None, typer.Option(help="CUDA graphs for multiples of it; else vLLM's sizes.")] = None,
    staging: str = "auto",
    bare_staging: Annotated[
        str | None, typer.Option(help="Without an area for versions that never come, two large models fit on a GPU.")
    ] = None,
    service_share: Annotated[float, typer.Option(help="Of the memory of both engines.")] = 0.5,
    free: Annotated[bool, typer.Option(help=FREE_HELP)] = False,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the published model.")] = None,
    folder: Annotated[Path, typer.Option(help="Where weights and versions are put.")] = Path("/dev/shm"),
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "rollout",
    door: Annotated[
        list[str] | None, typer.Option(help="Afterwards, updates through it, as in benchmarks.update.live.")
    ] = None,
    updates: Annotated[int, typer.Option(help="Through each door.")] = 2,
    verbose: Annotated[bool, typer.Option(help="Show the service's logs.")] = False,
) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/<name>.json."""
    console, cases = Console(), list[Case]()
    more = {
        "linear_backend": linear,
        "attention_backend": attention,
        "block_size": block_size,
        "max_num_batched_tokens": batched_tokens,
        "cuda_graph_sizes": graph_sizes(graph_step, groups * n),
        "staging": staging,
    }
    work = make_work(groups, n, (prompt_min, prompt_max), out, repeats)
    shape = {"groups": groups, "n": n, "prompt_tokens": [prompt_min, prompt_max], "output_tokens": out}
    doors = [UpdateCase(model, each, layers) for each in door or ()]
    run = datetime.now(UTC).isoformat(timespec="seconds")
    common: dict[str, Any] = {"run": run, "command": results.command()}
    common |= {"layers": layers, "work": shape, "engine": more}
    sides = side or list(SIDES)
    both = "bare" in sides and len(sides) > 1
    common |= {"service_share": service_share if both else None, "bare_staging": bare_staging}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = write_config(model, Path(temporary) / model, layers)
        for each in mode or ["fp8kv"]:
            found = {s: Case(model, each, s, envelope_gb) for s in SIDES if s in sides}
            share = memory_share(envelope_gb, service_share if both else 1.0)
            settings = settings_of(each, path, Path(temporary), work, more, share)
            if sides == ["bare"]:
                asyncio.run(alone(ServiceConfig.model_validate(settings), work, found["bare"]))
                add_to_file(name, found.values(), common)
            else:
                if not any(path.glob("*.safetensors")):
                    write_weights(path)
                pushed = Updates(doors, path, updates, concurrent=64) if doors else None
                keep = partial(add_to_file, name, found.values(), common)
                bare = {"gpu_memory_utilization": memory_share(envelope_gb, 1 - service_share)}
                bare |= {"staging": bare_staging or staging}
                spare = path if free else None
                served(settings, work, found, bare, Path(temporary), verbose, pushed, keep, spare)
            cases += found.values()
    console.print(table_of(cases))
    console.print(f"added to {results.path(name)}")
    if doors:
        console.print(table_of_updates(doors))


def memory_share(envelope_gb: float | None, of_all: float) -> float:
    """Of the GPU's memory, for one engine: the envelope, or that much ``of_all`` that engines have."""
    if envelope_gb is not None:
        return envelope_gb / (torch.cuda.get_device_properties(0).total_memory / 1e9)
    return ENGINES_SHARE * of_all


def add_to_file(name: str, new: Iterable[Case], common: dict[str, Any]) -> None:
    """In place of those that measured the same; before the updates, so that nothing that fails later loses them."""
    fresh = [case.as_json() | common for case in new]
    for case in fresh:
        print(json.dumps(case), flush=True)
    cases = joined(earlier_cases(results.path(name)), fresh)
    results.write(name, {"cases": cases, "ratios": ratios(cases)})


if __name__ == "__main__":
    typer.run(main)
