"""What the sides of the comparison are, and what is written and shown of them."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console
from vllm import AsyncEngineArgs
from vllm.config import CompilationConfig

from benchmarks import headlines
from benchmarks.common.command import spread
from benchmarks.common.gpu_limits import GpuLimits
from benchmarks.common.gpu_service import Mode, settings_of
from benchmarks.common.shapes import Shape, write_config
from benchmarks.group_attention import asked
from benchmarks.rollout import decode_step
from benchmarks.rollout.decode_step import (
    DEFAULT,
    SIDES,
    Comparison,
    Measured,
    StepOptions,
    StepShape,
    case_of,
    main,
    merged,
    most_engines,
    recorded_parts,
    settings_for,
    tables_of,
    without,
)
from benchmarks.rollout.engine_process import EngineGone, EngineProcess, NotRecorded, Recorded, Recording, Turn
from benchmarks.rollout.turns import Case, Sample
from rollout_service.config import ServiceConfig
from rollout_service.engine.extra import check_extra
from rollout_service.model.served_model import ServedModel

LIMITS = GpuLimits(copy_bytes_per_s=4e12, read_bytes_per_s=4e12, fp8_flops=1e15, bf16_flops=5e14)
WORK = asked("16x16x4096+512")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(write_config(Shape.QWEN3_8B, tmp_path_factory.mktemp("models") / "m"))


@pytest.mark.parametrize("side", [*SIDES, "act_unfused+qk_rope", "deep_gemm+nvrtc"])
def test_each_side_is_one_that_the_service_and_vllm_take(side: str, model: ServedModel) -> None:
    given = settings_for(side)
    base = StepShape().settings([WORK]) | {"extra": {"kv_cache_memory_bytes": 1 << 30}}
    section = merged(without(base, given), given)
    config = ServiceConfig.model_validate(settings_of(Mode.FP8KV, model.path, model.path, section))
    check_extra(config)
    assert config.engine.extra["kv_cache_memory_bytes"] == 1 << 30
    AsyncEngineArgs(model=str(model.path), compilation_config=CompilationConfig(**compilation(section)))
    assert (section["linear_backend"] == "deep_gemm") is side.startswith("deep_gemm")


def compilation(section: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = section["extra"].get("compilation_config", {})
    return found


def test_names_are_joined_and_contradictions_refused() -> None:
    both = settings_for("act_unfused+qk_rope")["extra"]["compilation_config"]["pass_config"]
    assert both == {"fuse_act_quant": False, "enable_qk_norm_rope_fusion": True}
    with pytest.raises(ValueError, match="there is no nothing, only default, act_unfused"):
        settings_for("nothing")
    with pytest.raises(ValueError, match="a is 1 and 2"):
        merged({"a": 1}, {"a": 2})


def test_three_engines_of_qwen3_8b_have_room_on_an_h200_and_two_on_an_h100(model: ServedModel) -> None:
    work = [WORK, asked("256x1x512+512")]
    [(on_h200, kv_bytes), (on_h100, _)] = (
        most_engines(model.path, Mode.FP8KV, work, total) for total in (150_000_000_000, 85_000_000_000)
    )
    assert (on_h200, on_h100) == (3, 2)
    assert kv_bytes > 256 * 1024 * 36 * 2 * 8 * 128


def measured(side: str, step_s: float, recorded: Recorded | None = None) -> Measured:
    """With 0.1 s besides the steps."""
    turns = Case("m", Mode.FP8KV, side, None)
    turns.add(Sample(seconds=0.1 + 512 * step_s, short_s=0.1 + 64 * step_s, tokens=512, cores={}, gpu={}), 256 * 512)
    return Measured(turns, recorded)


def test_a_case_says_how_far_it_is_from_the_limits_and_from_the_default(model: ServedModel) -> None:
    profile = {
        "ms": {"group attention": 4.0, "FlashAttention": 1.0, "matrix products": 5.0, "idle": 0.5},
        "step_ms": 10.5,
    }
    recorded = Recorded(kv_tokens=16 * 4096 + 256 * 100.0, profile=profile)
    default = measured(DEFAULT, 0.010)
    baseline = {"tokens_per_s": default.turns.rates, "step_ms": default.turns.step_ms}
    cases = [
        case_of(WORK, side, each, model, LIMITS, baseline) | {"model": "m", "mode": "fp8kv"}
        for side, each in (
            (DEFAULT, measured(DEFAULT, 0.010, recorded)),
            ("act_unfused", measured("act_unfused", 0.008)),
        )
    ]
    assert (cases[0]["ratio"], cases[0]["step_ratio"]) == (1.0, 1.0)
    assert cases[1]["step_ratio"] == pytest.approx(0.8) and cases[1]["ratio"] == pytest.approx(5.22 / 4.196)
    assert cases[0]["roofline"]["tokens_read"] == 16 * 4096 + 256 * 288  # from 64 to 512 tokens of each
    assert cases[0]["of_roofline"] == pytest.approx(cases[0]["roofline"]["limit_ms"] / 10)
    assert cases[0]["profile"]["roofline"]["tokens_read"] == recorded.kv_tokens
    assert cases[1]["settings"] == SIDES["act_unfused"] and "profile" not in cases[1]

    parts = {name: (limit, ms) for name, limit, ms in recorded_parts(cases[0]["profile"])}
    limits = {part["name"]: part["limit_ms"] for part in cases[0]["profile"]["roofline"]["parts"]}
    assert parts["attention"] == (limits["attention"], 5.0)
    assert parts["linear layers and output head"] == (limits["linear layers"] + limits["output head"], 5.0)

    console = Console(width=200)
    with console.capture() as captured:
        for table in tables_of(cases):
            console.print(table)
    rows = {
        cells[0]: cells[1:]
        for line in captured.get().splitlines()
        if (cells := [c.strip() for c in line.strip("│┃").split("│")])
    }
    assert rows["group attention"] == ["4.00", "0.00"]
    assert rows["a step by the clock"] == ["10.00", "8.00"]
    assert headlines.decode_step({"cases": cases}).startswith("m, 16x16x4096+512: 10.0 ms a step, its roofline ")


def test_a_side_without_a_baseline_has_no_ratio(model: ServedModel) -> None:
    case = case_of(
        WORK, "act_unfused", measured("act_unfused", 0.008), model, LIMITS, {"tokens_per_s": [], "step_ms": []}
    )
    assert case["ratio"] is None and case["step_ratio"] is None


def test_no_two_options_of_the_command_have_the_same_name() -> None:
    options = inspect.signature(spread(main)).parameters  # spread refuses a name twice
    assert (options["graph_step"].default, options["attention"].default) == (16, "group")


@dataclass
class Engine(EngineProcess):
    """Takes ten seconds of ``clock`` for each order, and is gone at order ``gone_at``."""

    clock: list[float]
    gone_at: int = 1000
    orders: list[Turn | Recording] = field(default_factory=list)

    def turn(self, turn: Turn, until: float) -> Sample:
        self._take(turn)
        return Sample(seconds=5.22, short_s=0.74, tokens=512, cores={}, gpu={})

    def record(self, recording: Recording, until: float) -> Recorded | NotRecorded:
        self._take(recording)
        return NotRecorded("nobody looked")

    def _take(self, order: Turn | Recording) -> None:
        self.orders.append(order)
        if len(self.orders) == self.gone_at:
            raise EngineGone("gone")
        self.clock[0] += 10.0

    def stop(self) -> None:
        pass


class Run:
    """A comparison of engines that are none, ``limit_s`` long."""

    def __init__(self, model: ServedModel, monkeypatch: pytest.MonkeyPatch, limit_s: float, gone_at: int = 1000):
        clock = [0.0]
        monkeypatch.setattr(decode_step.results, "write", lambda _, content: self.written.append(content["cases"]))
        monkeypatch.setattr(decode_step.results, "cases", lambda _: [])
        self.written: list[list[dict[str, Any]]] = []
        self.engines = {DEFAULT: Engine(clock), "act_unfused": Engine(clock, gone_at)}
        self.comparison = Comparison(
            StepOptions(), model, LIMITS, {"model": "m", "mode": "fp8kv"}, limit_s, Console(quiet=True),
            clock=lambda: clock[0],
        )  # fmt: skip
        self.comparison.engines |= self.engines
        self.comparison.started = dict.fromkeys(self.engines, (100.0, 300_000))
        self.comparison.measure(WORK)


def test_sides_take_turns_and_all_that_there_is_is_written(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Run(model, monkeypatch, limit_s=1000.0)
    for engine in done.engines.values():
        assert [type(order) for order in engine.orders] == [Turn, Turn, Turn, Recording]
        assert [order.warm_up for order in engine.orders if isinstance(order, Turn)] == [True, False, False]
    marks = [order.mark for engine in done.engines.values() for order in engine.orders if isinstance(order, Turn)]
    assert len(set(marks)) == 6
    assert [[len(case["samples"]) for case in cases] for cases in done.written] == [[1, 1], [2, 2], [2, 2]]


def test_nothing_is_begun_that_would_not_end_in_time(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short turns and two whole ones take 40 seconds, and nothing else less than ten."""
    done = Run(model, monkeypatch, limit_s=49.0)
    assert [len(engine.orders) for engine in done.engines.values()] == [2, 2]
    assert not any(isinstance(engine.orders[-1], Recording) for engine in done.engines.values())


def test_an_engine_that_is_gone_is_left_out(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Run(model, monkeypatch, limit_s=1000.0, gone_at=3)
    assert [len(engine.orders) for engine in done.engines.values()] == [4, 3]
    assert {case["side"]: len(case["samples"]) for case in done.written[-1]} == {DEFAULT: 2, "act_unfused": 1}
