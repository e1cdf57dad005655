"""Copy plans: the destination of each byte of a stored version in a worker's parameters, recorded from vLLM's loaders.

vLLM's layerwise reload pauses an engine 50 times as long as copying the bytes takes. During the first version's load,
``CopyRecorder`` records each copy from a part of a stored tensor to a part of a parameter. This includes fusing and
tensor-parallel sharding, so no layout is duplicated here. Later versions are staged in the layout that these copies
read (``placement.py``). ``CopyPlan`` then repeats the copies into the live parameters with a few kernel launches;
captured CUDA graphs stay valid.

This is correct only if the kernels use the checkpoint's layout. Therefore every parameter is compared, bit for bit,
with the plan's result. ``build`` raises ``NoPlan`` with the reason if one differs, and the engine keeps using the
layerwise reload.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollout_service.compat.vllm_internals import BaseLayerWithLoRA, is_deferred_attention_layer, is_of_kv_cache
from rollout_service.engine.loading.placement import Placement, Span
from rollout_service.gpu.grouped_copy import GroupedCopy, Rows
from rollout_service.store.manifest import Manifest


class NoPlan(Exception):
    """Raised when copies alone cannot reproduce the layerwise reload. The message has the reason."""


@dataclass(frozen=True)
class Copy:
    """A copy of ``rows`` byte ranges from a stored tensor into one parameter."""

    parameter: str
    tensor: str
    source: int
    """Offset of the first byte in the stored tensor."""
    target: int
    """Offset of the first byte in the parameter."""
    row_bytes: int
    rows: int = 1
    source_stride_bytes: int = 0
    target_stride_bytes: int = 0

    @property
    def span(self) -> Span:
        """The bytes that the copy reads. The span has no gaps if its rows overlap or are identical."""
        if self.rows > 1 and self.source_stride_bytes > self.row_bytes:
            return Span(self.tensor, self.source, self.row_bytes, self.rows, self.source_stride_bytes)
        return Span(self.tensor, self.source, (self.rows - 1) * self.source_stride_bytes + self.row_bytes)

    def staged_stride(self) -> int:
        """Return the stride of its rows where ``span`` is packed."""
        return self.row_bytes if self.span.rows > 1 else self.source_stride_bytes


class Sources:
    """The addresses of stored tensors while they are loaded."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, tuple[str, int]] = {}

    def add(self, tensor: str, memory: torch.Tensor) -> None:
        """Register a tensor in ``memory``, which is contiguous. Replaces all tensors at overlapping addresses."""
        address = memory.data_ptr()
        first, last = (bisect.bisect_left(self._starts, at) for at in (address, address + max(memory.nbytes, 1)))
        for start in self._starts[first:last]:
            del self._held[start]
        self._starts[first:last] = [address]
        self._held[address] = tensor, memory.nbytes

    def find(self, address: int) -> tuple[str, int] | None:
        """Return the tensor at an address and the byte offset in it."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        tensor, nbytes = self._held[self._starts[place]]
        byte = address - self._starts[place]
        return (tensor, byte) if byte < nbytes else None


class CopyRecorder(TorchFunctionMode):
    """Records every ``copy_`` from ``sources`` into a parameter of ``model`` inside its context."""

    def __init__(self, model: torch.nn.Module, sources: Sources) -> None:
        super().__init__()
        self._sources = sources
        self._modules, self._last = list(model.named_modules()), 0
        self._found: dict[int, tuple[str, torch.nn.Module]] = {}
        self.copies: list[Copy] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Execute the function, and record copies."""
        if func is torch.Tensor.copy_ and not args[0].is_meta and not args[1].is_meta:
            stored = self._sources.find(args[1].data_ptr())
            if stored is not None:
                self._note(args[0], args[1], *stored)
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, source: torch.Tensor, tensor: str, first: int) -> None:
        found = self._parameter_of(target)
        if found is None or target.shape != source.shape or target.dtype != source.dtype:
            return  # the parameter's bytes stay uncovered, so there is no plan
        name, parameter = found
        start = target.data_ptr() - parameter.data_ptr()
        for run in _runs(target, source):
            sizes = run.row_bytes, run.rows, run.source_stride_bytes, run.target_stride_bytes
            self.copies.append(Copy(name, tensor, first + run.source, start + run.target, *sizes))

    def _parameter_of(self, target: torch.Tensor) -> tuple[str, torch.nn.Parameter] | None:
        # a reload fills temporary parameters module by module, and reuses freed storage
        address = target.untyped_storage().data_ptr()
        known = self._found.get(address)
        if known is not None:
            name, module = known
            parameter = getattr(module, name.rpartition(".")[2], None)
            if isinstance(parameter, torch.nn.Parameter) and _address(parameter) == address:
                return name, parameter
        # loaders go through the modules in order: looking from the first one takes seconds with 48 layers of experts
        for index in (*range(self._last, len(self._modules)), *range(self._last)):
            prefix, module = self._modules[index]
            for leaf, parameter in module.named_parameters(recurse=False):
                if _address(parameter) == address:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    self._found[address], self._last = (name, module), index
                    return name, parameter
        return None


def _address(parameter: torch.nn.Parameter) -> int | None:
    return None if parameter.is_meta else parameter.untyped_storage().data_ptr()


def _runs(target: torch.Tensor, source: torch.Tensor) -> Iterator[Rows]:
    """Split a copy between two strided views of one shape into byte ranges that are contiguous in both."""
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


def placement_of(copies: Iterable[Copy], manifest: Manifest) -> Placement:
    """Return the packed placement of all bytes that the copies read, in file order: adjacent ranges stay adjacent."""
    place = {tensor.name: (tensor.file, tensor.offset) for tensor in manifest.tensors}
    return Placement(sorted((copy.span for copy in copies), key=lambda span: (*place[span.tensor], span.start)))


class CopyPlan:
    """The copies that load any version of one layout from a staging buffer into a model's live parameters."""

    def __init__(self, layout: str, placement: Placement, copies: GroupedCopy, launched_copies: int) -> None:
        self.layout = layout
        """Digest of the tensors that a version must have. Another layout needs another plan."""
        self.placement = placement
        """The layout of the staging buffer."""
        self.num_copies = launched_copies
        """Number of byte ranges after coalescing."""
        self._copies = copies

    def run(self) -> None:
        """Queue the copies on the current stream."""
        self._copies.run()

    @classmethod
    def build(
        cls, layout: str, placement: Placement, recorded: list[Copy], model: torch.nn.Module, area: torch.Tensor
    ) -> "CopyPlan":
        """Return the plan for a recorded layerwise reload. Raises NoPlan if copies would not give the same result.

        ``area`` is the staging buffer, which holds the loaded version as ``placement`` says.
        """
        _require_nothing_derived(model)
        parameters = {
            f"{prefix}.{leaf}" if prefix else leaf: parameter
            for prefix, module in model.named_modules()
            if not is_deferred_attention_layer(module)  # its parameters are scales of the KV cache, which no plan loads
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        by_parameter: dict[str, list[Copy]] = {name: [] for name in parameters}
        for copy in recorded:
            if copy.parameter not in by_parameter:
                raise NoPlan(f"{copy.parameter} is loaded, and is no parameter any more afterwards")
            by_parameter[copy.parameter].append(copy)
        for name, copies in by_parameter.items():
            _require_same(name, parameters[name], copies, placement, area)
        joined = _coalesce([_addresses(c, parameters[c.parameter], placement, area) for c in recorded])
        device = next(iter(parameters.values())).device
        return cls(layout, placement, GroupedCopy(joined, device), len(joined))


def _require_nothing_derived(model: torch.nn.Module) -> None:
    """Raise NoPlan if a module has tensors other than parameters and buffers. They may be derived from weights, like
    latent attention's absorbed matrices."""
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):  # holds the matrices of adapters, and wraps a layer
            continue
        derived = [
            key
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not (is_deferred_attention_layer(module) and is_of_kv_cache(key))
        ]
        if derived:
            raise NoPlan(f"{name} holds tensors that may be made from weights: {derived[:3]}")


def _require_same(
    name: str, parameter: torch.nn.Parameter, copies: list[Copy], placement: Placement, area: torch.Tensor
) -> None:
    """Raise NoPlan unless the copies into a parameter reproduce its bytes, with zeros in uncovered ones (padding)."""
    if not copies:
        raise NoPlan(f"{name} is loaded in another way than by copies, or not at all")
    in_order = in_memory_order(parameter.data)
    if not in_order.is_contiguous():
        raise NoPlan(f"{name} has gaps between its elements: its kernel changed the layout")
    held = in_order.view(-1).view(torch.uint8)
    planned = torch.zeros_like(held)
    for c in copies:
        end = c.target + (c.rows - 1) * c.target_stride_bytes + c.row_bytes
        if end > held.numel():
            raise NoPlan(f"{name} has {held.numel()} bytes, fewer than were loaded: its kernel changed the layout")
        shape, from_stride, to_stride = (c.rows, c.row_bytes), (c.staged_stride(), 1), (c.target_stride_bytes, 1)
        # offset from the start of the memory, of which the buffer may be a part
        rows = area.as_strided(shape, from_stride, area.storage_offset() + placement.places[c.span])
        planned.as_strided(shape, to_stride, c.target).copy_(rows)
    if not torch.equal(planned, held):
        raise NoPlan(f"{name} does not hold the stored bytes: its kernel changes them after loading")


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor in memory order. CUTLASS, for example, has a [K, N] view of the loaded [N, K]."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _addresses(copy: Copy, parameter: torch.nn.Parameter, placement: Placement, area: torch.Tensor) -> Rows:
    source, target = area.data_ptr() + placement.places[copy.span], parameter.data_ptr() + copy.target
    if copy.staged_stride() == copy.row_bytes == copy.target_stride_bytes:
        return Rows(source, target, copy.rows * copy.row_bytes)
    return Rows(source, target, copy.row_bytes, copy.rows, copy.staged_stride(), copy.target_stride_bytes)


def _coalesce(copies: list[Rows]) -> list[Rows]:
    """Return the same copies, with ranges coalesced that are adjacent on both sides."""
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
