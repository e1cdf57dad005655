"""The service, and the engine in it, that benchmarks on a GPU measure: random weights of a published shape."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from benchmarks.common.random_weights import gaussian
from benchmarks.common.rollout_work import Work
from rollout_service.config.deployment_file import BUILDER
from rollout_service.local import LocalService, running_service
from rollout_service.model.served_model import ServedModel
from rollout_service.threads import in_threads

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    "fp8": {"kv_cache": {"dtype": "bfloat16"}},
    "fp8kv": {"kv_cache": {"dtype": "fp8_e4m3"}},
}
FILE_BYTES = 2 << 30
FREE_HELP = "Remove the weights once version 0 is made; the door path cannot do without."
ENGINES_SHARE = 0.85
"""Of the GPU's memory, for all engines; the ingest and a trainer on the same GPU want some, too."""


def write_weights(folder: Path) -> None:
    """Random BF16 weights beside the model's config.json."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in ServedModel.load(folder).shapes.items():
        if size >= FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += 2 * math.prod(shape)

    def write(number: int) -> None:
        tensors = {name: gaussian(shape).cpu() for name, shape in files[number].items()}
        save_file(tensors, folder / f"model-{number + 1:05d}.safetensors")

    list(in_threads(write, range(len(files))))
    torch.cuda.empty_cache()


def remove_weights(folder: Path) -> None:
    """Those of ``write_weights``: room in memory, if the folder is there."""
    for file in folder.glob("*.safetensors"):
        file.unlink()


def settings_of(
    mode: str,
    model: Path,
    folder: Path,
    work: Work,
    more: dict[str, Any],
    share: float = ENGINES_SHARE,
) -> dict[str, Any]:
    """The configuration of one mode; ``more``: of the engine's. ``share``: of the GPU's memory, for the engine."""
    prompt_tokens = max(map(len, work.prompts)) + 8
    engine = {
        "max_model_len": -(-(prompt_tokens + work.sampling.max_tokens) // 64) * 64,
        "max_num_seqs": len(work.prompts) * work.sampling.n,
        "gpu_memory_utilization": round(share, 4),
        "admission_limit": 4096,
    }
    return {
        "model": {"path": str(model)},
        "quant": MODES[mode].get("quant", {}),
        "engine": engine | more,
        "kv_cache": dict(MODES[mode]["kv_cache"]),
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
