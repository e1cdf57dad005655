"""Report on a model's quantization, one row for each kind of tensor, and checks before any weight is read."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout_service.config import EngineConfig, ModelConfig, QuantConfig, ServiceConfig
from rollout_service.engine.attention.choice import SHOWN, attention_choice, attention_settings
from rollout_service.errors import InvalidManifest, NotFound
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.model.hub import config_file
from rollout_service.model.names import kind, ranges
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.model.weight_files import INDEX_FILE, listed_files
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import AttentionStatus
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import WEIGHT_FORMATS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SUFFIXES = tuple(form.scale_suffix for form in WEIGHT_FORMATS.values())
_INSTEAD = "name the checkpoint in BF16 that it was made from, and the service quantizes it (quant.weights)"


class TensorKind(Frozen):
    """Tensors with the same name except for layer and expert, the same shape and the same treatment."""

    name: str
    """Name without layer and expert: ``mlp.experts.*.up_proj``."""
    count: int
    layers: str
    """The decoder layers that have them, such as ``0-47``; empty outside of layers."""
    shape: tuple[int, ...]
    shard: tuple[int, int] | None
    """Shape of a GPU's shard of a matrix that could be quantized."""
    bf16_bytes: int
    """Size of all ``count`` tensors in BF16."""
    stored_bytes: int
    """Size of all ``count`` tensors in a weight version, with codes and scales if quantized."""
    dtype: Literal["FP8", "INT8", "BF16", "FP32"]
    """Stored dtype."""
    why_not: str
    """Reason why it is not quantized; empty if it is."""


class ModelReport(Frozen):
    """A model as the service would store and serve it."""

    model: str
    model_type: str
    parameters: int
    """Number of parameters; an output head that is the embedding is counted once."""
    tensor_parallel_size: int
    experts_per_gpu: tuple[int, int] | None
    """Number of whole routed experts on a GPU, of each layer: minimum and maximum; None: a GPU has a slice of every
    expert."""
    kinds: tuple[TensorKind, ...]
    layout: str
    """Source of the engine's layout of the model's layers: this release's table, or vLLM."""
    not_converted: tuple[str, ...]
    """Modules that could be quantized and are not, by the names that vLLM compares with."""
    attention: AttentionStatus
    """Attention kernels of an engine on a Hopper GPU."""

    @property
    def bf16_bytes(self) -> int:
        """Return the size of all tensors in BF16."""
        return sum(row.bf16_bytes for row in self.kinds)

    @property
    def stored_bytes(self) -> int:
        """Return the size of a weight version in bytes."""
        return sum(row.stored_bytes for row in self.kinds)


def inspect_model(
    source: ModelConfig, quant: QuantConfig, tensor_parallel_size: int = 1, expert_parallel: bool = False
) -> ModelReport:
    """Read config.json, which ``source.path`` is, or which is in that folder or repository; decide for each tensor.

    Raises FileNotFoundError, ModelNotDownloaded, or ValueError for a model that cannot be served with these settings,
    like ``ServedModel`` and ``require_sound_checkpoint``.
    """
    path = source.path if source.repo_id is None else config_file(source)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: no config.json there: name a folder in Hugging Face's layout, a config.json, or a repository on "
            "the Hugging Face hub, such as Qwen/Qwen3-8B"
        )
    model = ServedModel.load(folder)
    plan = model.plan(quant, tensor_parallel_size, expert_parallel)
    downloads = source.revision is not None  # the folder is in the hub's cache
    require_sound_checkpoint(folder, model, plan, config_alone=path.name == "config.json", downloads=downloads)
    # as vLLM 0.32 assigns them (expert_map_manager.py)
    experts = model.num_experts // tensor_parallel_size, -(-model.num_experts // tensor_parallel_size)
    return ModelReport(
        model=source.repo_id or folder.absolute().name,
        model_type=model.config.model_type,
        parameters=sum(math.prod(s) for name, s in model.shapes.items() if not (model.tied and name == model.head)),
        tensor_parallel_size=tensor_parallel_size,
        experts_per_gpu=experts if expert_parallel else None,
        kinds=tuple(_kinds(model, plan, tensor_parallel_size, expert_parallel)),
        layout=model.layout.source,
        not_converted=plan.not_converted,
        attention=_attention(folder, quant, tensor_parallel_size),
    )


def print_report(report: ModelReport, console: "Console") -> None:
    """Print a table, and what holds for the whole model below it."""
    console.print(_table(report))
    console.print(f"How the engine fuses and cuts layers: {report.layout}.", style="dim")
    [kernels] = report.attention.backends
    console.print(f"Attention on a Hopper GPU: {kernels}: {report.attention.why}.", style="dim", markup=False)


def _table(report: ModelReport) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=_title(report), title_justify="left", box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.header_style = table.footer_style = "bold"
    columns = _columns(report)
    for name, total, _ in columns:
        justify: Literal["left", "right"] = "left" if name in ("tensors", "stored as") else "right"
        table.add_column(name, footer=total, justify=justify, overflow="fold")
    for row in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*map(escape, row))
    return table


def _columns(report: ModelReport) -> list[tuple[str, str, list[str]]]:
    """Return heading, total and cells of each column."""
    kinds, names = report.kinds, [row.name for row in report.kinds]
    labels = [f"layers.{row.layers}.{row.name}" if names.count(row.name) > 1 else row.name for row in kinds]
    shards = ("shard", "", [_shape(row.shard) if row.shard else "" for row in kinds])
    return [
        ("tensors", "total", labels),
        ("count", f"{sum(row.count for row in kinds):,}", [f"{row.count:,}" for row in kinds]),
        ("shape", "", [_shape(row.shape) for row in kinds]),
        *([shards] if report.tensor_parallel_size > 1 else []),
        ("in BF16", _size(report.bf16_bytes), [_size(row.bf16_bytes) for row in kinds]),
        ("stored", _size(report.stored_bytes), [_size(row.stored_bytes) for row in kinds]),
        (
            "stored as",
            f"{report.stored_bytes / report.bf16_bytes:.1%} of BF16",
            [f"{row.dtype}: {row.why_not}" if row.why_not else row.dtype for row in kinds],
        ),
    ]


def _attention(folder: Path, quant: QuantConfig, tensor_parallel_size: int) -> AttentionStatus:
    """Return the attention kernels with the service's default settings otherwise."""
    engine = EngineConfig(tensor_parallel_size=tensor_parallel_size)
    choice = attention_choice(ServiceConfig(quant=quant, engine=engine), attention_settings(folder))
    chosen = "vLLM's choice" if choice.backend is None else SHOWN.get(choice.backend, choice.backend)
    return AttentionStatus(backends=(chosen,), why=choice.why)


def _kinds(model: ServedModel, plan: QuantPlan, tensor_parallel_size: int, expert_parallel: bool) -> list[TensorKind]:
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, shape in model.stored.items():
        alike = (kind(_module(name)), shape, _why_not(name, model, plan))
        groups.setdefault(alike, []).append(name)
    return [
        TensorKind(
            name=label,
            count=len(names),
            layers=ranges(int(name.split(".")[2]) for name in names if name.startswith("model.layers.")),
            shape=shape,
            shard=_shard(names[0], model, tensor_parallel_size, expert_parallel),
            bf16_bytes=2 * math.prod(shape) * len(names),
            stored_bytes=model.stored_bytes(names[0], plan) * len(names),
            dtype=_dtype(names[0], model, plan),
            why_not=why_not,
        )
        for (label, shape, why_not), names in groups.items()
    ]


def _why_not(name: str, model: ServedModel, plan: QuantPlan) -> str:
    """Return the reason why a tensor is not quantized; empty for those that are."""
    if name in plan.quantized:
        return ""
    if _module(name) in model.routers:
        return "router"
    if name == model.head:
        return "output head, a copy of the embedding" if model.tied else "output head"
    if name == model.embedding:
        return "embedding"
    if name in model.keep_float32:
        return "router's bias"
    if (why := plan.kept.get(_module(name))) is not None:
        return why
    if name.endswith(".bias"):
        return "bias"
    return "norm" if len(model.shapes[name]) == 1 else "not a linear layer"


def _shard(name: str, model: ServedModel, tensor_parallel_size: int, expert_parallel: bool) -> tuple[int, int] | None:
    module = _module(name)
    shape = model.layout.linears({name: model.shapes[name]}).get(module)
    if shape is None:
        return None
    shards = model.layout.shards(module, shape, tensor_parallel_size, expert_parallel=expert_parallel)
    return sum(rows for rows, _ in shards), shards[0][1]


def _dtype(name: str, model: ServedModel, plan: QuantPlan) -> Literal["FP8", "INT8", "BF16", "FP32"]:
    if name in plan.quantized:
        return "INT8" if plan.form.codes == "int8" else "FP8"
    return "FP32" if name in model.keep_float32 else "BF16"


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _title(report: ModelReport) -> str:
    gpus = f", cut for {report.tensor_parallel_size} GPUs" if report.tensor_parallel_size > 1 else ""
    if report.experts_per_gpu is not None:
        fewest, most = report.experts_per_gpu
        gpus += f" with {fewest if fewest == most else f'{fewest} or {most}'} whole experts each"
    return f"{report.model}: {report.model_type}, {report.parameters / 1e9:.2f} billion parameters{gpus}"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _size(nbytes: int) -> str:
    """Format a size with three digits in decimal units: 1 GB is 10⁹ bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            amount = nbytes / factor
            return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{nbytes} B"


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
