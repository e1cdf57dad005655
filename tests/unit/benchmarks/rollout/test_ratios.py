"""Which cases of several runs are compared."""

from typing import Any

from benchmarks.common.results import joined
from benchmarks.rollout.ratios import SAME, ratios


def _case(side: str, rate: float, **fields: Any) -> dict[str, Any]:
    defaults = {"model": "qwen3-8b", "mode": "fp8kv", "envelope_gb": None, "layers": None, "run": "first"}
    return {**defaults, "work": {"groups": 16}, "engine": {}, "side": side, "rates": [rate], **fields}


def _envelope(mode: str, rate: float, **fields: Any) -> dict[str, Any]:
    return _case("bare", rate, **{"mode": mode, "envelope_gb": 80.0, **fields})


def _engine(attention: str, block_size: int) -> dict[str, Any]:
    return {"attention_backend": attention, "block_size": block_size}


def test_a_case_replaces_the_one_that_measured_the_same() -> None:
    first = [_case("bare", 100.0), _case("http", 98.0)]
    again = _case("http", 99.0, run="second")
    longer = _case("http", 50.0, work={"groups": 32})
    found = joined(first, [again, longer], SAME)
    assert [(case["side"], case["rates"]) for case in found] == [("bare", [100.0]), ("http", [99.0]), ("http", [50.0])]


def test_service_and_bare_engine_are_compared_within_a_run() -> None:
    cases = [_case("bare", 100.0), _case("http", 98.0), _case("handle", 99.0, run="second")]
    assert ratios(cases) == {"http_to_bare": 0.98}


def test_of_several_pairs_the_worst_counts() -> None:
    moe = {"model": "qwen3-30b-a3b", "run": "second"}
    cases = [_case("bare", 100.0), _case("http", 98.0), _case("bare", 100.0, **moe), _case("http", 95.0, **moe)]
    assert ratios(cases) == {"http_to_bare": 0.95}


def test_a_rate_is_the_median_of_the_repeats() -> None:
    cases = [_case("bare", 0, rates=[90.0, 100.0, 300.0]), _case("handle", 0, rates=[1.0, 97.0, 98.0])]
    assert ratios(cases) == {"handle_to_bare": 0.97}


def test_envelopes_are_compared_by_model_and_work_over_runs() -> None:
    cases = [
        _envelope("bf16", 100.0),
        _envelope("fp8kv", 150.0, run="second"),
        _envelope("fp8kv", 900.0, work={"groups": 32}),
        _envelope("fp8", 900.0),
        _envelope("fp8kv", 900.0, envelope_gb=141.0),
        _envelope("bf16", 100.0, model="qwen3-30b-a3b"),
        _envelope("fp8kv", 300.0, model="qwen3-30b-a3b"),
    ]
    assert ratios(cases) == {"fp8kv_to_bf16_80gb_8b": 1.5, "fp8kv_to_bf16_80gb_30b": 3.0}


def test_the_services_attention_is_compared_with_flash_attention_where_all_else_is_alike() -> None:
    def with_attention(name: str, rate: float, **fields: Any) -> dict[str, Any]:
        return _envelope(**{"mode": "fp8kv", "rate": rate, "engine": _engine(name, 64), **fields})

    cases = [
        with_attention("auto", 130.0),
        with_attention("FLASH_ATTN", 100.0),
        with_attention("FLASH_ATTN", 10.0, work={"groups": 32}),
        with_attention("FLASH_ATTN", 10.0, mode="bf16"),
        with_attention("FLASH_ATTN", 10.0, engine=_engine("FLASH_ATTN", 16)),
    ]
    assert ratios(cases) == {"auto_to_flash_attn_80gb": 1.3}


def test_one_side_alone_has_no_ratio() -> None:
    assert ratios([_case("http", 98.0), _envelope("fp8kv", 150.0)]) == {}
