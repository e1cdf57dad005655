"""The kernels of an engine's decode steps, recorded by torch's profiler through vLLM."""

import asyncio
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from vllm.config import ProfilerConfig

from benchmarks.common.results import Json
from rollout_service.engine.adapter import EngineAdapter

NORMS = "norms, rotations, activations"
KINDS = (  # a kind of kernel, and what its name contains. The first match counts.
    # Inductor names its kernels after everything fused into them, including inputs from other kernels
    (NORMS, r"^triton_(poi|red|per|tem)_"),
    ("KV cache writes", r"reshape_and_cache|cache_kernel|concat_and_cache"),
    (
        "attention",
        r"^(choose_prefixes|form_chunks|fill_batch|spread_queries|merge_rows|decode_part|merge_parts)\b"
        r"|flash|fmha|attention|splitkv",
    ),
    ("quantizing activations", r"per_token_group|quant"),
    ("experts", r"fused_moe|moe_|topk_gating|expert|silu_and_mul"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|wgmma|matmul|splitK|linear|::mm$"),
    ("sampling", r"sampl|gumbel|logprob|topk|top_k|softmax|argmax|logits|ranks|temperature|sort|penalt"),
    (NORMS, r"triton_|norm|rotary|act_and_mul|silu"),
)


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS if re.search(names, kernel, re.IGNORECASE)), "other")


def profiler_into(folder: Path) -> ProfilerConfig:
    """Return vLLM's ``profiler_config`` that writes traces into the folder."""
    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(folder),
        torch_profiler_with_stack=False,
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
    )


async def prepare(engine: EngineAdapter) -> None:
    """Start the profiler once. Its first start takes seconds, in which an engine makes hundreds of steps."""
    await engine._llm.start_profile()
    await engine._llm.stop_profile()


async def record(engine: EngineAdapter, steps: int, folder: Path, seconds: float) -> Json:
    """Record the next steps of a busy engine that has ``profiler_into(folder)``, as ``summary``."""
    before = _traces(folder)
    await engine._llm.start_profile(max_iterations=steps)
    try:
        async with asyncio.timeout(seconds):
            while not (found := _traces(folder) - before):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RuntimeError(f"no trace of {steps} steps in {seconds:.0f} s: are enough tokens left?") from None
    finally:
        await engine._llm.stop_profile()  # it also waits until the trace is written
    [file] = found
    with gzip.open(file) as stream:
        return summary(json.load(stream)["traceEvents"])


def _traces(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.json.gz") if path.is_file()}


def summary(events: Iterable[Json]) -> Json:
    """Return the milliseconds of a step by kind of kernel, from a Chrome trace's events.

    vLLM marks each step with its sequences; ``batches`` counts the marks. Raises ValueError if there are no steps.
    """
    events = list(events)
    marks = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("execute_")]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels or not marks:
        raise ValueError(f"the trace holds {len(kernels)} kernels of {len(marks)} steps")
    by_kind = Counter[str]()
    for event in kernels:
        by_kind[kind_of(event["name"])] += event["dur"]
    span = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    per_step = 1e-3 / len(marks)
    return {
        "batches": dict(Counter(marks)),
        "recorded_step_ms": span * per_step,
        "kernels_ms": by_kind.total() * per_step,
        "ms": {kind: micros * per_step for kind, micros in by_kind.most_common()},
    }
