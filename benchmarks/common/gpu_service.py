"""The service, and the engine in it, that benchmarks on a GPU measure: random weights of a published shape."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from benchmarks.common.command import Options
from benchmarks.common.paths import CPU_DEPLOYMENT, SHARED_MEMORY
from benchmarks.common.shapes import Shape, gaussian, write_config
from benchmarks.common.work import WorkOptions
from rollout_service.config.deployment_file import BUILDER
from rollout_service.local import LocalService, running_service
from rollout_service.model.served_model import ServedModel
from rollout_service.runtime.threads import in_threads

Settings = dict[str, dict[str, Any]]


class Mode(StrEnum):
    """What is in FP8."""

    BF16 = "bf16"
    FP8 = "fp8"  # weights and activations
    FP8KV = "fp8kv"  # the KV cache, too


MODES: dict[Mode, Settings] = {
    Mode.BF16: {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    Mode.FP8: {"quant": {}, "kv_cache": {"dtype": "bfloat16"}},
    Mode.FP8KV: {"quant": {}, "kv_cache": {"dtype": "fp8_e4m3"}},
}
FILE_BYTES = 2 << 30
ENGINES_SHARE = 0.85  # of the GPU's memory, for all engines; the ingest and a trainer on the same GPU want some, too


class ModelOptions(Options):
    """The model and its service."""

    model: Shape = Shape.QWEN3_8B
    """Whose shapes."""
    folder: Path = SHARED_MEMORY
    """Where weights and versions are put."""
    free: bool = False
    """Remove the weights once version 0 is made; the transport path cannot do without."""


class EngineOptions(Options):
    """The engine."""

    attention: str = "auto"
    """engine.attention_backend."""
    block_size: int | None = None
    """Tokens of a page of the KV cache; vLLM's own choice if not given."""
    batched_tokens: int | None = None
    """Tokens of a step; vLLM's own choice if not given."""
    graph_step: int | None = None
    """CUDA graphs for multiples of it; vLLM's sizes if not given."""
    staging: str = "auto"
    """Where versions are staged: auto, device, host or none."""
    kv_gb: float | None = None
    """Of the KV cache; else what is left of the share, which vLLM measures: nothing else may start or end on the GPU
    meanwhile."""

    def settings(self, sequences: int) -> dict[str, Any]:
        """Return them in the service's terms, with CUDA graphs for up to so many sequences."""
        size = {} if self.kv_gb is None else {"extra": {"kv_cache_memory_bytes": int(self.kv_gb * 1e9)}}
        return {
            "attention_backend": self.attention,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.batched_tokens,
            "cuda_graph_sizes": graph_sizes(self.graph_step, sequences),
            "staging": self.staging,
            **size,
        }


def usual_engine(sequences: int) -> dict[str, Any]:
    """Return the settings of the engine where a benchmark has no options for it."""
    return EngineOptions(block_size=64, batched_tokens=8192, graph_step=16).settings(sequences)


def graph_sizes(step: int | None, sequences: int) -> list[int] | None:
    """Small powers of two, then every multiple of ``step`` up to all sequences at once; None: vLLM's own."""
    if step is None:
        return None
    return sorted({size for size in (1, 2, 4, 8) if size < step} | set(range(step, sequences + step, step)))


def fitting(work: WorkOptions) -> dict[str, Any]:
    """An engine's limits that the work just fits."""
    return {"max_model_len": -(-(work.prompt_max + 8 + work.out) // 64) * 64, "max_num_seqs": work.sequences}


def settings_of(mode: Mode, model: Path, folder: Path, engine: dict[str, Any]) -> Settings:
    """The configuration of one mode, its log below ``folder``. ``engine``: that section, in place of the usual one."""
    return {
        "model": {"path": str(model)},
        **deepcopy(MODES[mode]),
        "engine": {"gpu_memory_utilization": ENGINES_SHARE, "admission_limit": 4096} | engine,
        "scaling": {"num_gpus": 0.9},
        "weights": {
            "root": str(folder / f"log-{mode}"),
            "source_roots": [str(model)],
            "part_bytes": 64 << 20,
            "ingest_num_gpus": 0.1,
        },
    }


@contextmanager
def serving(settings: Settings, folder: Path, verbose: bool = False) -> Iterator[LocalService]:
    """The whole service until the block ends; its version 0 is made from the model's weights."""
    deployment = folder / "deployment.yaml"
    deployment.write_text(yaml.safe_dump({"applications": [{"import_path": BUILDER, "args": settings}]}))
    with running_service(deployment, verbose=verbose) as service:
        yield service


@contextmanager
def serving_random_weights(
    model: ModelOptions, engine: dict[str, Any], **sections: dict[str, Any]
) -> Iterator[tuple[LocalService, Path]]:
    """Serve random weights in FP8 with an FP8 KV cache; yield the service and the folder of its BF16 files."""
    with random_weights(model) as path, serving_weights(path, engine, **sections) as service:
        if model.free:
            remove_weights(path)
        yield service, path


@contextmanager
def random_weights(model: ModelOptions) -> Iterator[Path]:
    """Write random BF16 weights of the model's shapes, and yield their folder, until the block ends."""
    with tempfile.TemporaryDirectory(dir=model.folder) as temporary:
        path = write_config(model.model, Path(temporary) / model.model)
        write_weights(path)
        yield path


@contextmanager
def serving_weights(path: Path, engine: dict[str, Any], **sections: dict[str, Any]) -> Iterator[LocalService]:
    """Serve the weights at ``path`` as ``serving_random_weights`` does; the log is beside them."""
    settings = laid_over(settings_of(Mode.FP8KV, path, path.parent, engine), sections)
    with serving(settings, path.parent) as service:
        yield service


@contextmanager
def serving_tiny_model(**sections: dict[str, Any]) -> Iterator[LocalService]:
    """Run the shipped CPU deployment with the tiny model. ``sections`` are laid over its settings."""
    with tempfile.TemporaryDirectory() as folder:
        own: Settings = {
            "model": {"path": f"{folder}/tiny-qwen3"},
            "weights": {"root": f"{folder}/log", "source_roots": [folder]},
        }
        with running_service(CPU_DEPLOYMENT, laid_over(own, sections)) as service:
            yield service


def laid_over(*layers: Settings) -> Settings:
    """Return the layers in one, field by field; the last has the final say."""
    found: Settings = {}
    for layer in layers:
        for section, fields in layer.items():
            found[section] = {**found.get(section, {}), **fields}
    return found


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
    """Remove the files of ``write_weights``: room in memory, if the folder is there."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
