"""Where each byte of a stored version belongs in a worker's parameters, learnt by watching vLLM's own loaders once.

vLLM's layerwise reload keeps an engine closed for 50 times as long as the bytes take to copy. While it loads the first
version from a staging area, ``CopyRecorder`` sees which part of the area each loader copies into which part of which
parameter: fusing and tensor-parallel sharding included, no layout written down here. ``LoadPlan`` then does the same
copies straight into the live storage, in a few launches; captured CUDA graphs stay valid.

That is right only where the kernels use the checkpoint's layout, so every parameter is compared, bit for bit, with what
the plan would have put there; ``build`` raises ``NoPlan`` with the reason when one differs, and the engine keeps to the
layerwise way.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollout_service.engine.grouped_copy import GroupedCopy, Rows
from rollout_service.engine.vllm_internals import is_deferred_attention_layer, is_of_kv_cache


class NoPlan(Exception):
    """The layerwise reload does something that copies alone do not; says what."""


@dataclass(frozen=True)
class Copy:
    """``rows`` runs of bytes from the staging area into one parameter."""

    parameter: str
    source: int
    """First byte, counted from the start of the staging area."""
    target: int
    """First byte, counted from the start of the parameter."""
    row_bytes: int
    rows: int = 1
    source_stride_bytes: int = 0
    target_stride_bytes: int = 0


class CopyRecorder(TorchFunctionMode):
    """Notes every ``copy_`` from the staging area into a parameter of ``model`` that is done inside its context."""

    def __init__(self, model: torch.nn.Module, area: torch.Tensor) -> None:
        super().__init__()
        self._model, self._area = model, area
        self._found: dict[int, tuple[str, torch.nn.Module]] = {}
        self.copies: list[Copy] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let everything happen, and look at copies."""
        if func is torch.Tensor.copy_ and self._is_staged(args[1]) and not args[0].is_meta:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _is_staged(self, source: torch.Tensor) -> bool:
        return source.untyped_storage().data_ptr() == self._area.untyped_storage().data_ptr()

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        found = self._parameter_of(target)
        if found is None or target.shape != source.shape or target.dtype != source.dtype:
            return  # what it would have filled stays uncovered, and there is no plan
        name, parameter = found
        start = target.data_ptr() - parameter.data_ptr()
        for run in _runs(target, source):
            self.copies.append(
                Copy(
                    parameter=name,
                    source=source.data_ptr() - self._area.data_ptr() + run.source,
                    target=start + run.target,
                    row_bytes=run.row_bytes,
                    rows=run.rows,
                    source_stride_bytes=run.source_stride_bytes,
                    target_stride_bytes=run.target_stride_bytes,
                )
            )

    def _parameter_of(self, target: torch.Tensor) -> tuple[str, torch.nn.Parameter] | None:
        # a reload fills temporary parameters, one module after the other, and storage that was freed is used again
        address = target.untyped_storage().data_ptr()
        known = self._found.get(address)
        if known is not None:
            parameter = _parameter(known[1], known[0].rpartition(".")[2])
            if parameter is not None and parameter.untyped_storage().data_ptr() == address:
                return known[0], parameter
        for prefix, module in self._model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta and parameter.untyped_storage().data_ptr() == address:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    self._found[address] = name, module
                    return name, parameter
        return None


def _parameter(module: torch.nn.Module, leaf: str) -> torch.nn.Parameter | None:
    parameter = getattr(module, leaf, None)
    return parameter if isinstance(parameter, torch.nn.Parameter) and not parameter.is_meta else None


def _runs(target: torch.Tensor, source: torch.Tensor) -> Iterator[Rows]:
    """A copy between two strided views of one shape, as runs of bytes that are contiguous in both."""
    if not target.numel():
        return
    item = target.element_size()
    dims = [d for d in zip(target.shape, source.stride(), target.stride(), strict=True) if d[0] > 1]
    run = 1
    while dims and dims[-1][1] == dims[-1][2] == run:
        run *= dims.pop()[0]
    rows, source_stride, target_stride = dims.pop() if dims else (1, 0, 0)
    for index in itertools.product(*(range(size) for size, *_ in dims)):
        yield Rows(
            source=item * sum(i * s for i, (_, s, _) in zip(index, dims, strict=True)),
            target=item * sum(i * t for i, (_, _, t) in zip(index, dims, strict=True)),
            row_bytes=item * run,
            rows=rows,
            source_stride_bytes=item * source_stride,
            target_stride_bytes=item * target_stride,
        )


class LoadPlan:
    """The copies that load any version of one layout from one staging area into one model's live parameters."""

    def __init__(self, layout: str, copies: GroupedCopy, launched_copies: int) -> None:
        self.layout = layout
        """Which tensors lie where in the staging area; other layouts need a plan of their own."""
        self.num_copies = launched_copies
        """Runs of bytes, after neighbours were joined."""
        self._copies = copies

    def run(self) -> None:
        """Queue the copies on the current stream."""
        self._copies.run()

    @classmethod
    def build(cls, layout: str, recorded: list[Copy], model: torch.nn.Module, area: torch.Tensor) -> "LoadPlan":
        """The plan, after the layerwise reload that was recorded; raises NoPlan if it would not do the same."""
        _require_nothing_derived(model)
        parameters = _loadable_parameters(model)
        by_parameter: dict[str, list[Copy]] = {name: [] for name in parameters}
        for copy in recorded:
            if copy.parameter not in by_parameter:
                raise NoPlan(f"{copy.parameter} is loaded, and is no parameter any more afterwards")
            by_parameter[copy.parameter].append(copy)
        for name, copies in by_parameter.items():
            _require_same(name, parameters[name], copies, area)
        joined = _joined([_addresses(c, parameters[c.parameter], area) for c in recorded])
        device = next(iter(parameters.values())).device
        return cls(layout, GroupedCopy(joined, device), len(joined))


def _loadable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All but the KV cache's scales, which a plan does not load."""
    return {
        f"{prefix}.{leaf}" if prefix else leaf: parameter
        for prefix, module in model.named_modules()
        if not is_deferred_attention_layer(module)
        for leaf, parameter in module.named_parameters(recurse=False)
    }


def _require_nothing_derived(model: torch.nn.Module) -> None:
    """Tensors beside parameters and buffers may be made from weights (as latent attention's absorbed matrices are)."""
    for name, module in model.named_modules():
        derived = [
            key
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not (is_deferred_attention_layer(module) and is_of_kv_cache(key))
        ]
        if derived:
            raise NoPlan(f"{name} holds tensors that may be made from weights: {derived[:3]}")


def _require_same(name: str, parameter: torch.nn.Parameter, copies: list[Copy], area: torch.Tensor) -> None:
    """The copies into one parameter leave what is there now, and whatever they do not fill is zero (padding)."""
    if not copies:
        raise NoPlan(f"{name} is loaded in another way than by copies, or not at all")
    if not parameter.is_contiguous():
        raise NoPlan(f"{name} is not contiguous: its kernel changed the layout")
    held = parameter.data.reshape(-1).view(torch.uint8)
    planned = torch.zeros_like(held)
    for c in copies:
        end = c.target + (c.rows - 1) * c.target_stride_bytes + c.row_bytes
        if end > held.numel():
            raise NoPlan(f"{name} has {held.numel()} bytes, fewer than were loaded: its kernel changed the layout")
        shape, from_stride, to_stride = (c.rows, c.row_bytes), (c.source_stride_bytes, 1), (c.target_stride_bytes, 1)
        rows = area.as_strided(shape, from_stride, c.source)
        planned.as_strided(shape, to_stride, c.target).copy_(rows)
    if not torch.equal(planned, held):
        raise NoPlan(f"{name} does not hold the stored bytes: its kernel changes them after loading")


def _addresses(copy: Copy, parameter: torch.nn.Parameter, area: torch.Tensor) -> Rows:
    return Rows(
        source=area.data_ptr() + copy.source,
        target=parameter.data_ptr() + copy.target,
        row_bytes=copy.row_bytes,
        rows=copy.rows,
        source_stride_bytes=copy.source_stride_bytes,
        target_stride_bytes=copy.target_stride_bytes,
    )


def _joined(copies: list[Rows]) -> list[Rows]:
    """The same copies, with runs that follow each other on both sides made one."""
    joined: list[Rows] = []
    for copy in sorted(copies, key=lambda c: c.source):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.rows == copy.rows == 1
            and (last.source + last.row_bytes, last.target + last.row_bytes) == (copy.source, copy.target)
        ):
            joined[-1] = Rows(last.source, last.target, last.row_bytes + copy.row_bytes)
        else:
            joined.append(copy)
    return joined
