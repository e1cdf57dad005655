"""Checks of a checkpoint's small files before any weight is read: its quantization, and its tensors' names."""

import json
from pathlib import Path
from typing import Any

from rollout_service.errors import InvalidManifest, NotFound
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.model.weight_files import INDEX_FILE, listed_files
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import WEIGHT_FORMATS

_SUFFIXES = tuple(form.scale_suffix for form in WEIGHT_FORMATS.values())
_INSTEAD = "name the checkpoint in BF16 that it was made from, and the service quantizes it (quant.weights)"


def require_sound_checkpoint(
    folder: Path, model: ServedModel, plan: QuantPlan, *, config_alone: bool, downloads: bool
) -> None:
    """Raise ValueError if version 0 could not be created from ``folder``, or its tokenizer.json is damaged.

    Reads config.json, and the headers of existing safetensors; without these the index, if there is one.
    ``config_alone``: other files of ``folder`` do not belong to it, or are incomplete.
    ``downloads``: the service downloads the safetensors that ``folder`` lacks.
    """
    quantized = _foreign_quantization(folder)
    if config_alone:
        if quantized:
            raise ValueError(f"{folder / 'config.json'}: {quantized}")
        return
    _ = model.tokenizer
    if any(folder.glob("*.safetensors")) and not (downloads and _lacks_shards(folder)):
        try:
            model.check_table(FolderSource(folder, ignored=model.ignored).table, plan)
        except (InvalidManifest, NotFound) as error:
            raise ValueError(f"{error.message}{'; ' if quantized else ''}{quantized}") from error
        return
    if quantized:
        raise ValueError(f"{folder}: {quantized}")
    if (index := folder / INDEX_FILE).is_file():
        content = index.read_bytes()
        listed_files(content)
        _require_names({str(name) for name in json.loads(content)["weight_map"]}, model)


def _lacks_shards(folder: Path) -> bool:
    index = folder / INDEX_FILE
    return index.is_file() and not all((folder / name).is_file() for name in listed_files(index.read_bytes()))


def _foreign_quantization(folder: Path) -> str:
    """Return why the weights' published format cannot be read, and what to do; empty for BF16 and for FP8 in our
    blocks."""
    config = json.loads((folder / "config.json").read_bytes())
    said = _quantization(config) or _quantization(config.get("text_config") or {})
    if said is None:
        return ""
    method, block = said.get("quant_method") or said.get("quant_algo"), said.get("weight_block_size")
    if method == "fp8" and block == [BLOCK, BLOCK]:
        return ""
    of = f" in blocks of {block}" if block else " with a scale for each tensor or channel"
    blocks = of if method == "fp8" else ""
    return f"config.json says that its weights are quantized with {method}{blocks}, which is not read here: {_INSTEAD}"


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    said = config.get("quantization_config") or config.get("compression_config")
    return said if isinstance(said, dict) else None


def _require_names(names: set[str], model: ServedModel) -> None:
    """Raise ValueError for unknown or missing tensors, by the index alone."""
    known = {*model.shapes, *model.in_memory}
    bare = {next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name) for name in names}
    wrong = {"unknown": sorted(name for name in bare - known if name not in model.ignored)}
    if model.in_memory.keys().isdisjoint(names):  # else experts are stacked, and their names on disk do not occur
        optional = {model.head} if model.tied else set()
        wrong["missing"] = sorted(model.stored.keys() - bare - optional)
    if any(wrong.values()):
        what = "; ".join(f"{len(items)} {kind}: {', '.join(items[:4])}" for kind, items in wrong.items() if items)
        raise ValueError(
            f"{model.path / INDEX_FILE} does not fit the model of config.json: {what}; if it is quantized, {_INSTEAD}"
        )
