"""Where a decode step's milliseconds go, how far it is from the GPU's limits, and what other settings make of it.

    python -m benchmarks.rollout.decode_step --limit-s 380
    python -m benchmarks.rollout.decode_step --side act_unfused --side inductor_quant --case 16x16x4096+512
    python -m benchmarks.rollout.decode_step --side deep_gemm+nvrtc --case 16x16x4096+512

Bare engines of the service's configuration with random weights of a published shape, FP8 with an FP8 cache, attention
``group``; ``--side`` names other settings, whose engines differ in nothing else (``SIDES``; joined by ``+``, several at
once). All engines live on the GPU together, each in its own process; they start at the same time and take turns with
the same work, ``groups x completions x prompt + output``. What does not start by ``--start-s`` is left out.

First, before there are engines, the GPU's limits are measured: a copy, a sum, and products of matrices in FP8 and BF16
(``benchmarks/common/gpu_limits.py``). Then, of each case and side:

- tokens/s, and by the difference of two lengths of runs what a step takes, without a profiler;
- what the step's roofline is, ``benchmarks/rollout/roofline.py``, in which the formulas stand, with as many tokens in
  the KV cache as on average over the steps that were measured;
- a recording of ``--steps`` steps by torch's profiler: milliseconds of a step by kinds of kernels, and the roofline of
  those very steps. Launches take longer while it records, so *idle* is an upper bound.

What Inductor compiles counts as *norms, rotations, activations*; with ``inductor_quant`` that quantizes, too, and with
``act_unfused`` SiLU is there and not in a kernel of *quantizing activations*: compare the sum.
What there is of a case is written as soon as it is there; nothing is begun that would not end by ``--limit-s``.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_limits import GpuLimits, gpu_limits
from benchmarks.common.gpu_service import ENGINES_SHARE, Mode, Settings, settings_of
from benchmarks.common.results import Json
from benchmarks.common.shapes import write_config
from benchmarks.group_attention import Asked, ShapeOptions, asked, engine_bytes, kv_cache_bytes
from benchmarks.rollout.engine_process import (
    EngineGone,
    EngineProcess,
    NotRecorded,
    Recorded,
    Recording,
    Turn,
    stop_all,
)
from benchmarks.rollout.roofline import ATTENTION, HEAD, LINEAR, own_tokens, roofline, tokens_at
from benchmarks.rollout.turns import SHORT, Case, Sample
from rollout_service.model.served_model import ServedModel

RESULT = "rollout_decode_step"
SAME = ("model", "mode", "layers", "attention", "case", "side", "beside")
DEFAULT, SHORT_TURN = "default", "short turn"


def _passes(**which: bool) -> dict[str, Any]:
    return {"extra": {"compilation_config": {"pass_config": which}}}


SIDES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    # vLLM fuses SiLU, and norms, with the quantizing after them, on by default; off, SiLU and norms are Inductor's
    "act_unfused": _passes(fuse_act_quant=False),
    "norm_unfused": _passes(fuse_norm_quant=False),
    # off by default, and slower on an H100 than what Inductor makes of it, says vLLM's issue 34391
    "qk_rope": _passes(enable_qk_norm_rope_fusion=True),
    # quantizing in PyTorch's terms, for Inductor to fuse; the passes then have nothing to match
    "inductor_quant": {"extra": {"compilation_config": {"custom_ops": ["-quant_fp8"]}}},
    # kernels are compiled when they are first needed, and not for every number of tokens
    "deep_gemm": {"linear_backend": "deep_gemm", "env": {"VLLM_DEEP_GEMM_WARMUP": "skip"}},
    # DeepGEMM's own setting: compile by CUDA's library in place of nvcc
    "nvrtc": {"env": {"DG_JIT_USE_NVRTC": "1"}},
}
KINDS_OF = {
    (LINEAR, HEAD): ("matrix products",),
    (ATTENTION,): ("group attention", "FlashAttention", "attention"),
}
"""Parts of the roofline → kinds of the profile that they are the limits of."""
_GPU_SHARE = 0.95
"""Of the GPU's memory, for all engines."""


class StepShape(ShapeOptions):
    """The model and the engines."""

    graph_step: int = 16
    """CUDA graphs for multiples of it, and for small powers of two."""


class StepOptions(Options):
    """What is measured."""

    side: tuple[str, ...] = ()
    """Beside the default: settings, joined by +. May be repeated; SIDES in the module says what there is."""
    case: tuple[str, ...] = ("16x16x4096+512", "256x1x512+512")
    """Groups x completions x prompt + output; may be repeated. The first are run first."""
    mode: Mode = Mode.FP8KV
    """What is in FP8: bf16, fp8 (weights) or fp8kv (weights and KV cache)."""
    attention: str = "group"
    """engine.attention_backend."""
    repeats: int = 2
    """Turns of each side and case, after a short one that is not counted."""
    steps: int = 20
    """Decode steps that are recorded of each side and case; 0: none."""
    start_s: float = 240.0
    """Engines that take longer to start are left out."""
    limit_s: float = 400.0
    """The whole command is to end by then."""


def settings_for(side: str) -> dict[str, Any]:
    """Of ``engine``, for names joined by ``+``. Raises ValueError for a name that there is not, or a contradiction."""
    found: dict[str, Any] = {}
    for name in side.split("+"):
        if name not in SIDES:
            raise ValueError(f"--side {side}: there is no {name}, only {', '.join(SIDES)}")
        found = merged(found, SIDES[name])
    return found


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, mappings within them merged likewise. Raises ValueError for a key that has different values."""
    found = dict(one)
    for key, value in other.items():
        if isinstance(found.get(key), Mapping) and isinstance(value, Mapping):
            found[key] = merged(found[key], value)
        elif found.setdefault(key, value) != value:
            raise ValueError(f"{key} is {found[key]} and {value}")
    return found


@dataclass
class Measured:
    """One side of one case."""

    turns: Case
    recorded: Recorded | None = None


@dataclass
class Comparison:
    """All sides and cases, and the time that is left for them."""

    options: StepOptions
    model: ServedModel
    limits: GpuLimits
    common: Json
    """What else each case says."""
    until: float
    """By ``clock``."""
    console: Console
    clock: Callable[[], float] = time.monotonic
    """In seconds."""
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    """By side; those that are gone are taken out."""
    started: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds, and tokens of KV cache, by side."""
    found: dict[Asked, dict[str, Measured]] = field(default_factory=dict)
    marks: int = 0
    longest: dict[tuple[Asked, str], float] = field(default_factory=dict)
    """Seconds of what was done so far, of which case and by what; at first, as long as a short turn."""

    def start(self, settings: Mapping[str, Settings], folder: Path, stack: ExitStack) -> None:
        """All engines at once. Raises EngineGone or TimeoutError if the default does not start."""
        until = min(self.until, self.clock() + self.options.start_s)
        stack.callback(lambda: stop_all(self.engines.values()))
        for side, each in settings.items():
            (traces := folder / f"traces-{side}").mkdir()
            self.engines[side] = EngineProcess(side, each, traces)
        for side in list(self.engines):
            try:
                ready = self.engines[side].started(until)
            except (EngineGone, TimeoutError) as error:
                if side == DEFAULT:
                    raise
                self._leave_out(side, error)
                continue
            self.started[side] = ready.seconds, ready.kv_tokens
            self.console.print(f"{side}: started in {ready.seconds:.0f} s, {ready.kv_tokens} tokens of KV cache")

    def _leave_out(self, side: str, error: Exception) -> None:
        self.console.print(f"left out: {error}")
        self.engines.pop(side).stop()

    def measure(self, case: Asked) -> None:
        """Turns of all sides, then a recording of each."""
        self.found[case] = {}
        for side, (seconds, kv_tokens) in self.started.items():
            turns = Case(self.common["model"], self.options.mode, side, None, start_s=seconds, kv_tokens=kv_tokens)
            self.found[case][side] = Measured(turns)
        for repeat in range(-1, self.options.repeats):
            for side in list(self.engines):
                self._turn(case, side, warm_up=repeat < 0)
            self.keep(case)
        if self.options.steps:
            for side in list(self.engines):
                self._record(case, side)
            self.keep(case)

    def _turn(self, case: Asked, side: str, *, warm_up: bool) -> None:
        self.marks += 1
        turn = Turn(case, str(self.marks), warm_up)
        sample = self._timed(
            case, SHORT_TURN if warm_up else "turn", side, lambda: self.engines[side].turn(turn, self.until)
        )
        if isinstance(sample, Sample) and not warm_up:
            self.found[case][side].turns.add(sample, case.sequences * case.output_tokens)
            rate = self.found[case][side].turns.rates[-1]
            self.console.print(f"{case} {side}: {rate:.0f} tokens/s, {sample.step_ms:.2f} ms a step")

    def _record(self, case: Asked, side: str) -> None:
        order = Recording(case, self.options.steps)
        answer = self._timed(case, "recording", side, lambda: self.engines[side].record(order, self.until))
        if isinstance(answer, NotRecorded):
            self.console.print(f"{case} {side}: not recorded: {answer.why}")
        elif isinstance(answer, Recorded):
            self.found[case][side].recorded = answer

    def _timed(self, case: Asked, what: str, side: str, call: Callable[[], object]) -> object:
        """Its answer; None if there is no time left for it, or the engine is gone."""
        began = self.clock()
        likely = self.longest.get((case, what)) or self.longest.get((case, SHORT_TURN), 0.0)
        if began + likely > self.until:
            self.console.print(f"{case} {side}: no time left for a {what}")
            return None
        try:
            answer = call()
        except (EngineGone, TimeoutError) as error:
            self._leave_out(side, error)
            return None
        self.longest[case, what] = max(self.longest.get((case, what), 0.0), self.clock() - began)
        return answer

    def keep(self, case: Asked) -> None:
        """Add to the result what there is of the case."""
        fresh = [self.common | each for each in self.cases(case)]
        if fresh:
            results.write(RESULT, {"cases": results.joined(results.cases(RESULT), fresh, SAME)})

    def cases(self, case: Asked) -> list[Json]:
        """Of each side that has run."""
        default = self.found[case][DEFAULT].turns
        baseline = {"tokens_per_s": default.rates, "step_ms": default.step_ms}
        return [
            case_of(case, side, each, self.model, self.limits, baseline)
            for side, each in self.found[case].items()
            if each.turns.rates
        ]


def case_of(
    case: Asked,
    side: str,
    each: Measured,
    model: ServedModel,
    limits: GpuLimits,
    baseline: Mapping[str, list[float]],
) -> Json:
    """Figures of one side. ``baseline``: tokens_per_s and step_ms of the default's turns, none if it has none."""
    mode, turns = Mode(each.turns.mode), each.turns.as_json()
    mean_own = (case.output_tokens // SHORT + case.output_tokens) / 2
    least = roofline(model, mode, case.sequences, tokens_at(case, mean_own), limits)
    found = {
        "case": str(case),
        "side": side,
        "settings": settings_for(side),
        "start_s": turns["start_s"],
        "kv_tokens": turns["kv_tokens"],
        "tokens_per_s": turns["tokens_per_s"],
        "step_ms": turns["step_ms"],
        "fixed_s": turns["fixed_s"],
        "ratio": _ratio(turns["tokens_per_s"], baseline["tokens_per_s"]),
        "step_ratio": _ratio(turns["step_ms"], baseline["step_ms"]),
        "roofline": least,
        "of_roofline": least["limit_ms"] / turns["step_ms"],
        "limits": asdict(limits) | {"bytes_per_s": limits.bytes_per_s},
        "samples": turns["samples"],
    }
    if each.recorded is not None:
        tokens = tokens_at(case, own_tokens(case, each.recorded.kv_tokens))
        found["profile"] = each.recorded.profile | {"roofline": roofline(model, mode, case.sequences, tokens, limits)}
    return found


def _ratio(value: float, baseline: list[float]) -> float | None:
    return value / statistics.median(baseline) if baseline else None


def most_engines(path: Path, mode: Mode, work: Iterable[Asked], total_bytes: int) -> tuple[int, int]:
    """How many have room beside each other on a GPU of so much memory, and the bytes of each one's KV cache."""
    cache = kv_cache_bytes(path, mode, work)
    return int(_GPU_SHARE * total_bytes // engine_bytes(path, mode, cache)), cache


def tables_of(cases: list[Json]) -> list[Table]:
    """Of one case, for people: all sides, and where the default's step is from its limits."""
    sides = Table(title=f"{cases[0]['model']}, {cases[0]['case']}: ms of a decode step on {results.machine()}")
    for column in ("", *(case["side"] for case in cases)):
        sides.add_column(column, justify="right" if column else "left")
    profiles = [case.get("profile", {"ms": {}}) for case in cases]
    for kind in dict.fromkeys(kind for profile in profiles for kind in profile["ms"]):
        sides.add_row(kind, *(f"{profile['ms'].get(kind, 0):.2f}" for profile in profiles))
    sides.add_row("a recorded step", *(f"{p['step_ms']:.2f}" if p["ms"] else "" for p in profiles))
    sides.add_section()
    rows = (("a step by the clock", "step_ms", ".2f"), ("÷ default's", "step_ratio", ".3f"))
    for title, key, how in (*rows, ("tokens/s", "tokens_per_s", ".0f"), ("÷ default's", "ratio", ".3f")):
        sides.add_row(title, *("" if case[key] is None else format(case[key], how) for case in cases))
    sides.add_row("besides the steps, s", *(f"{case['fixed_s']:.2f}" for case in cases))
    sides.add_row("of a step the roofline", *(f"{case['of_roofline']:.1%}" for case in cases))
    return [sides, _limits_table(cases[0])]


def _limits_table(case: Json) -> Table:
    limits = case["limits"]
    title = (
        f"{case['side']}: the least of each part, at {limits['bytes_per_s'] / 1e12:.2f} TB/s, "
        f"{limits['fp8_flops'] / 1e12:.0f} TFLOPS in FP8, {limits['bf16_flops'] / 1e12:.0f} in BF16"
    )
    table = Table("", title=title)
    for column in ("reading, ms", "computing, ms", "limit, ms"):
        table.add_column(column, justify="right")
    for part in case["roofline"]["parts"]:
        table.add_row(part["name"], *(f"{part[key]:.2f}" for key in ("reading_ms", "computing_ms", "limit_ms")))
    table.add_row("a step", "", "", f"{case['roofline']['limit_ms']:.2f}")
    if "profile" in case:
        table.add_section()
        for name, limit, measured in recorded_parts(case["profile"]):
            table.add_row(f"{name}, recorded: {measured:.2f} ms", "", f"{limit / measured:.0%} of it", f"{limit:.2f}")
    return table


def recorded_parts(profile: Json) -> list[tuple[str, float, float]]:
    """Parts of the roofline, the limit of the recorded steps in ms, and what their kernels took; if they took any."""
    limits = {part["name"]: part["limit_ms"] for part in profile["roofline"]["parts"]}
    found = []
    for names, kinds in KINDS_OF.items():
        if measured := sum(profile["ms"].get(kind, 0.0) for kind in kinds):
            found.append((" and ".join(names), sum(limits[name] for name in names), measured))
    return found


def main(shape: StepShape, options: StepOptions) -> None:
    """Measure, print the tables, and add each case to benchmarks/results/<machine>/rollout_decode_step.json."""
    until, console = time.monotonic() + options.limit_s, Console()
    work, sides = [asked(each) for each in options.case], list(dict.fromkeys((DEFAULT, *options.side)))
    own = {side: settings_for(side) for side in sides}
    with tempfile.TemporaryDirectory(dir=shape.folder) as temporary, ExitStack() as stack:
        folder = Path(temporary)
        path = write_config(shape.model, folder / shape.model, shape.layers)
        model = ServedModel.load(path)
        total: int = torch.cuda.get_device_properties(0).total_memory
        most, kv_bytes = most_engines(path, options.mode, work, total)
        if len(sides) > most:
            raise ValueError(f"{len(sides)} engines, and {most} have room beside each other: give fewer of --side")
        limits = gpu_limits()
        console.print(limits)
        common = {
            "gpu_memory_utilization": round(ENGINES_SHARE / len(sides), 4),
            "attention_backend": options.attention,
            "extra": {"kv_cache_memory_bytes": kv_bytes},  # nothing is measured, so that all can start at once
        }
        base = shape.settings(work) | common
        engines = {
            side: settings_of(options.mode, path, folder / side, merged(without(base, given), given))
            for side, given in own.items()
        }
        said = {
            "model": shape.model, "mode": options.mode, "layers": shape.layers, "attention": options.attention,
            "beside": sides, "engine": base,
        }  # fmt: skip
        comparison = Comparison(options, model, limits, said, until, console)
        comparison.start(engines, folder, stack)
        for case in work:
            comparison.measure(case)
        for case in work:
            if cases := [said | each for each in comparison.cases(case)]:
                for table in tables_of(cases):
                    console.print(table)
    console.print(f"added to {results.path(RESULT)}")


def without(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings but for those that ``given`` replaces: what has no keys of its own."""
    return {k: v for k, v in settings.items() if k not in given or isinstance(v, Mapping)}


if __name__ == "__main__":
    run(main)
