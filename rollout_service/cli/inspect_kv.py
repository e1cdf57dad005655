"""Measure from a checkpoint if FP8 is accurate enough for a model's keys and values, before any engine starts.

transformers runs one forward pass of the calibration batch, with the weights of one decoder layer in memory at a time.
Each layer is read when the pass reaches it and freed afterwards, so a model of any size needs only the memory of its
largest layer, or of its embedding.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import InvalidRequest
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.kv_scales.fp8_error import ErrorLimits, unfit_layers, why_unfit
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.kv_scales.scales import LayerScales, ScaledFrom
from rollout_service.model.families import FAMILIES
from rollout_service.model.quant_plan import SCALE_SUFFIX, QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.experts import Piece, pieces
from rollout_service.protocol.kv_scales import LayerError
from rollout_service.quant.blockwise import dequantize_blockwise

if TYPE_CHECKING:
    from rich.console import Console


class LayerReport(Frozen):
    """Keys and values of one attention layer."""

    name: str
    largest: tuple[float, float, float]
    """The largest |q|, |k| and |v|."""
    scales: LayerScales
    """Scales computed from these, with which the errors are measured."""
    error: LayerError
    unfit: str
    """Reason why FP8 is not accurate enough; empty if it is."""


class KVReport(Frozen):
    """All layers, and the verdict by the service's criterion (docs/kv_scales.md)."""

    dtype: Literal["fp8_e4m3", "bfloat16"]
    """The dtype that ``kv_cache.dtype: auto`` would choose, if the engine measured the same."""
    verdict: str
    """In words, with the setting to use."""
    tokens: int
    """Positions that were measured."""
    measured_on: str
    """Origin of the tokens."""
    layers: tuple[LayerReport, ...]


def inspect_kv(
    path: Path, *, prompts: Path | None = None, device: str = "auto", progress: Callable[[int, int], None] | None = None
) -> KVReport:
    """Measure the checkpoint in the folder ``path`` (or beside the config.json that it is).

    Args:
        prompts: as ``kv_cache.calibration.prompts``; None: the random tokens that a new service uses.
        device: ``cpu``, which computes in fp32, ``cuda``, in BF16, or ``auto``: a GPU if there is one.
        progress: called with the number of completed decoder layers, and their total number.

    Raises FileNotFoundError, or ValueError for an unusable model or prompts; InvalidManifest for the weights;
    InvalidRequest if it cannot be measured, for example for latent attention.
    """
    folder = path.parent if path.name == "config.json" else path
    served, on = ServedModel.load(folder), _device(device)
    if served.config.model_type not in FAMILIES:
        raise InvalidRequest(
            f"{folder} is of the family {served.config.model_type}; keys and values of a checkpoint are measured for "
            f"{', '.join(FAMILIES)}: with kv_cache.dtype: auto an engine measures them"
        )
    batch = CalibrationBatch(
        KVCalibrationConfig(prompts=prompts), served.vocab_size, served.config.max_position_embeddings
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            served.config, dtype=torch.float32 if on.type == "cpu" else torch.bfloat16, attn_implementation="sdpa"
        )
    ids, mask = _padded(batch.sequences(), on)
    with (
        torch.no_grad(),
        observe_qkv(model, measured_with=ScaledFrom()) as observation,
        layer_by_layer(model.eval(), Checkpoint(folder, served), on, progress),
    ):
        model.base_model(ids, attention_mask=mask, use_cache=False)
    errors, largest = observation.errors(), observation.amax()
    unfit = unfit_layers(errors)
    scales = observation.scales(model=str(folder)).layers
    return KVReport(
        dtype="bfloat16" if unfit else "fp8_e4m3",
        verdict=_verdict(unfit, len(errors)),
        tokens=observation.tokens,
        measured_on=batch.origin,
        layers=tuple(
            LayerReport(
                name=name,
                largest=tuple(largest[name][0].tolist()),
                scales=scales[name],
                error=error,
                unfit=unfit.get(name, ""),
            )
            for name, error in errors.items()
        ),
    )


class Checkpoint:
    """Tensors of a folder under transformers' names in memory: experts stacked, codes dequantized."""

    def __init__(self, folder: Path, model: ServedModel) -> None:
        """Raises InvalidManifest, with every name, unless it holds exactly the model's tensors."""
        self._source = FolderSource(folder, ignored=model.ignored)
        self._experts = model.experts
        self._names = {tensor.name for tensor in self._source.table}
        self._codes = frozenset(name for name in self._names if name + SCALE_SUFFIX in self._names)
        model.check_table(self._source.table, QuantPlan(self._codes))

    def tensor(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of the shape and dtype of ``like``. Raises InvalidManifest if its file was changed, or
        OSError."""
        whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        stored = [Piece(name, tuple(like.shape))] if name in self._names else pieces(name, like.shape, self._experts)
        for piece in stored:
            whole[piece.index] = self._read(piece.name, device)
        return whole

    def _read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor; unless it is dequantized, it is in a buffer that the next call reuses."""
        names = [name, name + SCALE_SUFFIX] if name in self._codes else [name]
        found = [tensor for _, tensor in self._source.read(names)]
        return dequantize_blockwise(*(tensor.to(device) for tensor in found)) if name in self._codes else found[0]


@contextmanager
def layer_by_layer(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[None]:
    """Within the context, load the weights of each part of ``model.base_model`` only while it computes.

    ``model`` is on the meta device. Raises InvalidRequest for a part that computes with more than its weights.
    """
    backbone, prefix = model.base_model, f"{model.base_model_prefix}."
    parts = dict(_parts(backbone))
    num_layers = sum(name.startswith("layers.") for name in parts)
    with ExitStack() as hooks:
        for name, part in parts.items():
            if list(part.parameters()):
                load = part.register_forward_pre_hook(_loading(prefix + name, checkpoint, device))
                hooks.callback(load.remove)
                hooks.callback(part.register_forward_hook(_give_up).remove)
            if progress is not None and name.startswith("layers."):
                done = int(name.removeprefix("layers.")) + 1
                shown = part.register_forward_hook(lambda *_, done=done: progress(done, num_layers))
                hooks.callback(shown.remove)
            for buffer in _computed_buffers(part):
                backbone.add_module(name, _computed_anew(part, buffer, model).to(device))
        yield


@contextmanager
def layers_shown(console: "Console") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and remove it afterwards; yields the callback for ``inspect_kv``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("decoder layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def print_kv_report(report: KVReport, console: "Console") -> None:
    """Print a row for each layer, the limits, and the verdict."""
    from rich.table import Table

    limits = ErrorLimits()
    relative, channel = f"{limits.relative:.0%}", f"{limits.channel_relative:.0%}"
    table = Table(
        title=f"Keys and values in FP8, measured on {report.tokens:,} {report.measured_on}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        show_footer=True,
    )
    table.header_style = table.footer_style = "bold"
    for heading, footer in (
        ("layer", "limit"),
        ("max |k|", ""),
        ("max |v|", ""),
        ("k error", relative),
        ("v error", relative),
        ("k/channel", channel),
        ("v/channel", channel),
        ("logits", f"{limits.logit_rms:g}"),
        ("", ""),
    ):
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for layer in report.layers:
        error = layer.error
        shares = (error.k_relative, error.v_relative, error.k_channel_relative, error.v_channel_relative)
        table.add_row(
            layer.name.removeprefix("model.layers.").removesuffix(".self_attn"),
            *(f"{value:.3g}" for value in layer.largest[1:]),
            *(f"{share:.1%}" for share in shares),
            f"{error.logit_rms:.2g}",
            "unfit" if layer.unfit else "",
        )
    console.print(table)
    console.print(report.verdict, soft_wrap=True, markup=False, highlight=False)


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise InvalidRequest("torch sees no GPU: use --device cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _verdict(unfit: dict[str, str], num_layers: int) -> str:
    if unfit:
        return (
            f"{why_unfit(unfit, num_layers)}. Set kv_cache.dtype: bfloat16; with auto an engine would start in FP8, "
            "measure this, and start again"
        )
    return f"FP8 is accurate enough for the keys and values of all {num_layers} layers: leave kv_cache.dtype at auto"


def _padded(sequences: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, int64 [sequences, longest]; padding is at the end."""
    longest = max(map(len, sequences))
    ids = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _parts(backbone: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the parts that a backbone calls one after the other: its children, and each decoder layer."""
    for name, child in backbone.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((f"{name}.{number}", layer) for number, layer in enumerate(child))
        else:
            yield name, child


def _loading(name: str, checkpoint: Checkpoint, device: torch.device) -> Callable[..., None]:
    def load(part: torch.nn.Module, *_: object) -> None:
        state = part.state_dict()
        weights = {leaf: checkpoint.tensor(f"{name}.{leaf}", like, device) for leaf, like in state.items()}
        part.load_state_dict(weights, assign=True)

    return load


def _give_up(part: torch.nn.Module, *_: object) -> None:
    part.to("meta")


def _computed_buffers(part: torch.nn.Module) -> list[str]:
    """Return the buffers that no checkpoint holds, such as the frequencies of the rotary embedding."""
    return sorted({name for name, _ in part.named_buffers()} - part.state_dict().keys())


def _computed_anew(part: torch.nn.Module, buffer: str, model: PreTrainedModel) -> torch.nn.Module:
    """Recompute the rotary embedding, which transformers creates from the configuration alone."""
    if list(part.parameters()):
        raise InvalidRequest(
            f"{type(part).__name__} of {type(model).__name__} computes with {buffer}, which no checkpoint holds: only "
            "an engine can measure such a model, with kv_cache.dtype: auto"
        )
    made: torch.nn.Module = type(part)(model.config)
    return made
