"""What a GPU of 80 GB holds of a large model, and what that makes of tokens/s; through the whole service, as shipped.

    python -m benchmarks.rollout.memory --model qwen3-30b-a3b --staging auto --staging device --mode fp8kv --mode bf16
    python -m benchmarks.rollout.memory --model qwen3-32b --envelope-gb 80      on a larger GPU

Random weights of published shapes in FP8, FP8 KV cache, HTTP. Every sequence has a prompt of its own; all are submitted
at once and run to their end, what does not fit waits. Then one version is pushed as a folder while 64 rollouts run: how
long it closed the engine. ``--bf16``: before that the bare vLLM engine with BF16 weights and cache, the same work, no
staging area and no service, which can only be to its advantage. Adds its cases to
benchmarks/results/<machine>/rollout_memory.json, in place of earlier ones of the same model and staging.
"""

import asyncio
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import (
    ENGINES_SHARE,
    FILE_BYTES,
    EngineOptions,
    Mode,
    Settings,
    fitting,
    serving,
    settings_of,
)
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.random_weights import gaussian
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import Work, WorkOptions
from benchmarks.rollout.throughput import bare, over_http
from benchmarks.rollout.turns import Case as Turns
from benchmarks.rollout.turns import take_turns
from benchmarks.update.busy import rollouts
from benchmarks.update.live import Case as Update
from benchmarks.update.live import Transport, push
from rollout_service.client import RolloutClient
from rollout_service.config import QuantConfig, ServiceConfig
from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.quantizer import Quantizer

RESULT = "rollout_memory"
SAME = ("model", "layers", "mode", "side", "staging", "gpu_gb", "work")
"""Fields in which two cases agree that measured the same."""


class MemoryOptions(Options):
    """What is compared."""

    model: tuple[Shape, ...] = (Shape.QWEN3_30B_A3B,)
    """Whose shapes; may be repeated."""
    layers: int | None = None
    """Fewer layers than the published models."""
    staging: tuple[str, ...] = ("auto",)
    """May be repeated."""
    mode: tuple[Mode, ...] = (Mode.FP8KV,)
    """fp8kv or fp8: through the service; bf16: the bare engine. May be repeated."""
    envelope_gb: float | None = None
    """All the GPU memory that an engine may use; the service's share of the GPU if not given."""
    checkpoint: Path = Path(tempfile.gettempdir())
    """Where the model's weights are put."""
    log: Path = SHARED_MEMORY
    """Where versions are put."""
    verbose: bool = False
    """Show the service's logs."""


class MemoryWork(WorkOptions):
    """The work."""

    groups: int = 192
    """Distinct prompts."""
    n: int = 1
    """Completions of each prompt."""
    prompt_min: int = 1024
    """Tokens of the shortest prompt."""
    prompt_max: int = 2048
    """Tokens of the longest prompt; lengths are spread evenly between them."""
    out: int = 2048
    """Tokens of a completion."""


ENGINE = EngineOptions(block_size=64, batched_tokens=8192, graph_step=16)
"""As deployments/fp8_rollout.yaml has it, with fewer CUDA graphs, which start sooner."""


@dataclass
class Case:
    """One engine of one model."""

    model: str
    layers: int | None
    mode: str
    side: str
    """``http``, or ``bare``."""
    staging: str
    """What was asked for."""
    staged: str
    """What it was."""
    gpu_gb: float
    """What the engine may use."""
    work: results.Json
    kv_tokens: int = 0
    """What the KV cache holds."""
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    """Of the whole work."""
    closed_s: list[float] = field(default_factory=list)
    """By an update."""
    load_s: list[float] = field(default_factory=list)
    """Of it, loading."""


def say(what: str) -> None:
    """A line of progress: a whole case takes many minutes."""
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def write_fp8(folder: Path) -> None:
    """Random weights as codes and scales, as published FP8 checkpoints have them, beside the model's config.json."""
    model = ServedModel.load(folder)
    quantized = model.plan(QuantConfig()).quantized
    for number, names in enumerate(_files(model), start=1):
        held: dict[str, torch.Tensor] = {}
        matrices = [(name, gaussian(model.shapes[name])) for name in names if name in quantized]
        for (name, _), (codes, scales) in zip(matrices, Quantizer().quantize(matrices, to_cpu=True), strict=True):
            held |= {name: codes, name + SCALE_SUFFIX: scales}
        held |= {name: gaussian(model.shapes[name]).cpu() for name in names if name not in quantized}
        save_file(held, folder / f"model-{number:05d}.safetensors")
        say(f"wrote {number * FILE_BYTES / 1e9:.0f} GB of weights")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _files(model: ServedModel) -> Iterator[list[str]]:
    """Names of about as many bytes each."""
    names: list[str] = []
    size = 0
    for name, shape in model.shapes.items():
        names.append(name)
        size += math.prod(shape)
        if size >= FILE_BYTES:
            yield names
            names, size = [], 0
    yield names


async def measure_bare(settings: Settings, work: Work, case: Case) -> None:
    """The engine alone, on dummy weights."""
    turns = Turns(case.model, case.mode, case.side, case.gpu_gb)
    async with bare(ServiceConfig.model_validate(settings), turns) as generate:
        await take_turns(work, 1, {"bare": generate}, {"bare": turns})
    _note(turns, case, turns.kv_tokens)


async def measure_service(url: str, folder: Path, work: Work, case: Case) -> None:
    """Rollouts over HTTP, and one update."""
    turns = Turns(case.model, case.mode, case.side, case.gpu_gb)
    async with RolloutClient(url) as client:
        say("the service is up; a short run, then the whole one")
        await take_turns(work, 1, {"http": over_http(client)}, {"http": turns})
        [replica] = (await client.fleet()).replicas
        _note(turns, case, replica.load.kv_cache_tokens if replica.load else None)
        case.staged = replica.staging or case.staged
        say(f"{case.tokens_per_s:,.0f} tokens/s; now an update")
        update = Update(case.model, Transport.PATH, case.layers)
        with rollouts(url, 64):
            await push(client, 1, folder, update)
        case.closed_s, case.load_s = update.closed_s, update.load_s


def _note(turns: Turns, case: Case, kv_tokens: int | None) -> None:
    [rate], [sample] = turns.rates, turns.samples
    case.tokens_per_s, case.seconds, case.kv_tokens = rate, sample.seconds, kv_tokens or 0


def keep(case: Case) -> None:
    """Add it to the result."""
    print(json.dumps(asdict(case)), flush=True)
    results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [asdict(case)], SAME)})


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"one GPU on {results.machine()}")
    for column in ("model", "mode", "side", "staging"):
        table.add_column(column)
    for column in ("GB", "KV cache, tokens", "tokens/s", "closed, s"):
        table.add_column(column, justify="right")
    for c in cases:
        closed = ", ".join(f"{seconds:.3f}" for seconds in c.closed_s)
        staging = c.staging if c.staging == c.staged else f"{c.staging}: {c.staged}"
        numbers = (f"{c.gpu_gb:.0f}", f"{c.kv_tokens:,}", f"{c.tokens_per_s:,.0f}", closed)
        table.add_row(c.model, c.mode, c.side, staging, *numbers)
    return table


def main(options: MemoryOptions, work: MemoryWork) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/rollout_memory.json."""
    total_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    share = ENGINES_SHARE if options.envelope_gb is None else round(options.envelope_gb / total_gb, 4)
    cases: list[Case] = []

    def case_of(model: Shape, mode: Mode, side: str, staging: str) -> Case:
        case = Case(model, options.layers, mode, side, staging, staging, round(share * total_gb, 1), work.as_json())
        cases.append(case)
        return case

    for model in options.model:
        with tempfile.TemporaryDirectory(dir=options.checkpoint) as checkpoint:
            folder = write_config(model, Path(checkpoint) / model, options.layers)
            section = fitting(work) | ENGINE.settings(work.sequences) | {"gpu_memory_utilization": share}
            if Mode.BF16 in options.mode:
                case = case_of(model, Mode.BF16, "bare", "none")
                settings = settings_of(Mode.BF16, folder, Path(checkpoint), section | {"staging": "none"})
                asyncio.run(measure_bare(settings, work.make(), case))
                keep(case)
            served = [mode for mode in options.mode if mode != Mode.BF16]
            if served:
                write_fp8(folder)
            for mode, staging in itertools.product(served, options.staging):
                with tempfile.TemporaryDirectory(dir=options.log) as log:
                    settings = settings_of(mode, folder, Path(log), section | {"staging": staging})
                    case = case_of(model, mode, "http", staging)
                    say(f"the service starts: {model}, {mode}, staging {staging}")
                    with serving(settings, Path(log), options.verbose) as service:
                        asyncio.run(measure_service(service.url, folder, work.make(), case))
                    keep(case)
            shutil.rmtree(folder)
    console = Console()
    console.print(table_of(cases))
    console.print(f"added to {results.path(RESULT)}")


if __name__ == "__main__":
    run(main)
