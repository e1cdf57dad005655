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
from benchmarks.common.shapes import Shape, gaussian, write_config
from benchmarks.common.work import PUBLISHED, TINY, WorkOptions, random_prompts
from rollout_service.config.deployment_file import BUILDER
from rollout_service.local import LocalService, running_service
from rollout_service.model.served_model import ServedModel
from rollout_service.model.tiny import make_tiny_qwen3
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
    """The model."""

    model: str = Shape.QWEN3_8B.value
    """A published shape, or tiny."""
    folder: Path = Path(tempfile.gettempdir()) / "shipped-models"
    """Where weights are put; those of an earlier run are used again."""

    def model_folder(self) -> Path:
        """Return the model's folder; its random weights are written if it has none."""
        here = (self.folder / self.model).absolute()
        if not any(here.glob("*.safetensors")):
            if self.model == "tiny":
                make_tiny_qwen3(here)
            else:
                write_weights(write_config(Shape(self.model), here))
                torch.cuda.empty_cache()
        return here

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Return prompts of random tokens that the model has, each its own."""
        return random_prompts([tokens] * count, token_ids=TINY if self.model == "tiny" else PUBLISHED)


class EngineOptions(Options):
    """The engine."""

    engine: str = ""
    """Settings of ``engine`` that differ from the usual ones, in YAML: ``staging: none, block_size: 128``."""

    def settings(self, sequences: int) -> dict[str, Any]:
        """Return the engine's settings, with CUDA graphs for up to so many sequences."""
        usual = {"block_size": 64, "max_num_batched_tokens": 8192, "cuda_graph_sizes": graph_sizes(sequences)}
        different: dict[str, Any] = yaml.safe_load(f"{{{self.engine}}}")
        return usual | different


def graph_sizes(sequences: int) -> list[int]:
    """Return small powers of two, then every multiple of 16 up to all sequences at once."""
    return [1, 2, 4, 8, *range(16, sequences + 16, 16)]


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
