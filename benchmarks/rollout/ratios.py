"""What the cases of several runs of ``throughput`` are to each other."""

import statistics

from benchmarks.common.results import Json

SAME = ("model", "mode", "side", "envelope_gb", "layers", "work", "engine")
"""Fields in which two cases agree that measured the same."""
ENVELOPE_GB = 80.0
ENVELOPES = {"fp8kv_to_bf16_80gb_8b": "qwen3-8b", "fp8kv_to_bf16_80gb_30b": "qwen3-30b-a3b"}
"""Name of the ratio → the model's shapes."""
SIDES = {"http_to_bare": "http", "handle_to_bare": "handle"}


def ratios(cases: list[Json]) -> dict[str, float]:
    """The ratios that the cases allow.

    ``http_to_bare`` and ``handle_to_bare``: within one run, without an envelope; of several such pairs the lowest.
    ``fp8kv_to_bf16_80gb_…``: bare engines in 80 GB with the same work, and the attention that the service chooses; the
    last pair. ``auto_to_flash_attn_80gb``: that attention and FlashAttention, all else alike; the last pair.
    """
    found: dict[str, float] = {}
    for name, side in SIDES.items():
        pairs = [(a, b) for a in cases for b in cases if _is_service_and_bare(a, b, side)]
        if pairs:
            found[name] = min(_rate(a) / _rate(b) for a, b in pairs)
    for name, model in ENVELOPES.items():
        pairs = [(a, b) for a in cases for b in cases if a["model"] == model and _is_fp8kv_and_bf16(a, b)]
        if pairs:
            found[name] = _rate(pairs[-1][0]) / _rate(pairs[-1][1])
    if pairs := [(a, b) for a in cases for b in cases if _is_auto_and_flash(a, b)]:
        found["auto_to_flash_attn_80gb"] = _rate(pairs[-1][0]) / _rate(pairs[-1][1])
    return {name: round(value, 4) for name, value in found.items()}


def _is_service_and_bare(a: Json, b: Json, side: str) -> bool:
    same = all(a[field] == b[field] for field in ("run", "model", "mode", "envelope_gb", "work", "engine"))
    return same and a["side"] == side and b["side"] == "bare" and a["envelope_gb"] is None


def _is_fp8kv_and_bf16(a: Json, b: Json) -> bool:
    as_shipped = _attention(a) == _attention(b) == "auto"
    return _are_bare_in_80_gb(a, b) and as_shipped and (a["mode"], b["mode"]) == ("fp8kv", "bf16")


def _is_auto_and_flash(a: Json, b: Json) -> bool:
    alike = a["mode"] == b["mode"] and a["engine"] | {"attention_backend": "FLASH_ATTN"} == b["engine"]
    return _are_bare_in_80_gb(a, b) and alike and _attention(a) == "auto"


def _are_bare_in_80_gb(a: Json, b: Json) -> bool:
    same = all(a[field] == b[field] for field in ("model", "work", "layers"))
    return same and a["side"] == b["side"] == "bare" and a["envelope_gb"] == b["envelope_gb"] == ENVELOPE_GB


def _attention(case: Json) -> str:
    chosen: str = case["engine"].get("attention_backend", "auto")
    return chosen


def _rate(case: Json) -> float:
    return float(statistics.median(case["rates"]))
