"""The service, and the engine in it, that benchmarks on a GPU measure: random weights of a published shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from benchmarks.random_weights import gaussian
from benchmarks.rollout_work import Work
from rollout_service.deployment_file import BUILDER
from rollout_service.local import LocalService, running_service
from rollout_service.weights.served_model import ServedModel

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    "fp8": {"kv_cache": {"dtype": "bfloat16"}},
    "fp8kv": {"kv_cache": {"dtype": "fp8_e4m3"}},
}
FILE_BYTES = 2 << 30


def write_weights(folder: Path) -> None:
    """Random BF16 weights beside the model's config.json."""
    group: dict[str, torch.Tensor] = {}
    size, number = 0, 0
    shapes = ServedModel.load(folder).shapes
    for i, (name, shape) in enumerate(shapes.items(), start=1):
        group[name] = gaussian(shape).cpu()
        size += group[name].nbytes
        if size >= FILE_BYTES or i == len(shapes):
            number += 1
            save_file(group, folder / f"model-{number:05d}.safetensors")
            group, size = {}, 0
    torch.cuda.empty_cache()


def settings_of(
    mode: str,
    model: Path,
    folder: Path,
    work: Work,
    envelope_gb: float | None,
    more: dict[str, Any],
    *,
    engines: int = 1,
) -> dict[str, Any]:
    """The configuration of one mode; ``more``: of the engine's. ``engines``: that share the GPU's memory."""
    gpu_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    prompt_tokens = max(map(len, work.prompts)) + 8
    engine = {
        "max_model_len": -(-(prompt_tokens + work.sampling.max_tokens) // 64) * 64,
        "max_num_seqs": len(work.prompts) * work.sampling.n,
        "gpu_memory_utilization": round((envelope_gb or 0.85 * gpu_gb / engines) / gpu_gb, 4),
        "admission_limit": 4096,
    }
    return {
        "model": {"path": str(model)},
        "quant": MODES[mode].get("quant", {}),
        "engine": engine | more,
        "kv_cache": MODES[mode]["kv_cache"],
        "scaling": {"num_gpus": 0.9},
        "weights": {
            "root": str(folder / f"log-{mode}"),
            "source_roots": [str(model)],
            "part_bytes": 64 << 20,
            "ingest_num_gpus": 0.1,
        },
    }


def graph_sizes(step: int | None, sequences: int) -> list[int] | None:
    """Small powers of two, then every multiple of ``step`` up to all sequences at once; None: vLLM's own."""
    if step is None:
        return None
    return sorted({size for size in (1, 2, 4, 8) if size < step} | set(range(step, sequences + step, step)))


@contextmanager
def serving(settings: dict[str, Any], folder: Path, verbose: bool) -> Iterator[LocalService]:
    """The whole service until the block ends; its version 0 is made from the model's weights."""
    deployment = folder / "deployment.yaml"
    deployment.write_text(yaml.safe_dump({"applications": [{"import_path": BUILDER, "args": settings}]}))
    with running_service(deployment, verbose=verbose) as service:
        yield service
