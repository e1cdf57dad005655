"""Convert a trainer's tensors to the form that engines load: BF16, or codes and scales.

The ingest does this, or the trainer before it sends, both with this code, so a version has the same bytes either way.
Needs torch, but neither ray nor transformers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import NamedTuple, get_args

import numpy as np
import torch

from rollout_service.errors import InvalidManifest, QuantizationError
from rollout_service.gpu.streams import lies_on_gpu
from rollout_service.protocol.experts import pieces
from rollout_service.protocol.tensors import StoredDtype, TensorSlot
from rollout_service.protocol.upload import TrainerRecipe, UploadTensor
from rollout_service.quant.blockwise import any_has_all_bits, are_finite, concatenate_small, require_finite
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.formats import CODE_DTYPES, FP8_BLOCK, WEIGHT_FORMATS, WeightFormat, is_codes
from rollout_service.quant.quantizer import Device, Quantizer

BATCH_BYTES = 128 << 20
"""Maximum bytes for one call of the quantizer; a single matrix may be larger. Hundreds of experts' matrices thus share
one launch."""

_CACHED_NAMES = 100_000
"""Number of names for which the result of the ignore patterns is cached: a mixture of experts has 20 000 at every
push."""
_NAN_CODE, _NO_INT8_CODE = 0x7F, -128
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_TORCH: dict[StoredDtype, torch.dtype] = {name: getattr(torch, name) for name in get_args(StoredDtype)}

Named = tuple[str, torch.Tensor]


class Becomes(NamedTuple):
    """The stored form of a part of a trainer's tensor."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    part: tuple[int | slice, ...]
    """The part is ``tensor[part]``; all of the tensor if empty."""
    scales: str | None
    """Name of the scales that are made with it; None: it is not quantized here."""


class Converter:
    """Converts tensors by one recipe. ``device`` as for ``Quantizer``. Thread-safe."""

    def __init__(self, recipe: TrainerRecipe, *, device: Device = "auto", batch_bytes: int = BATCH_BYTES) -> None:
        self.form = FP8_BLOCK if recipe.weights == "none" else WEIGHT_FORMATS[recipe.weights]
        """Format of quantized weights."""
        self.makes_powers_of_two = recipe.scales == "power_of_two"
        self._experts = recipe.experts
        self._is_ignored = lru_cache(_CACHED_NAMES)(recipe.ignored.__contains__)
        self._quantized = frozenset(recipe.quantized)
        self._scales = frozenset(name + self.form.scale_suffix for name in recipe.quantized)
        self._float32 = frozenset(recipe.keep_float32) | self._scales
        self._quantizer = Quantizer(power_of_two=self.makes_powers_of_two, device=device, form=self.form)
        self.uses_gpu = self._quantizer.uses_gpu
        """True if weights on the CPU are quantized on a GPU."""
        self._batch_bytes = batch_bytes

    def slots(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorSlot]:
        """Yield every tensor of a version in the order of storage: that of ``shapes``, so that a layer's parts are
        adjacent and vLLM's reload, which waits for all parts of a fused layer, buffers one layer at a time."""
        for name, shape in shapes.items():
            if name in self._quantized:
                yield TensorSlot(name=name, dtype=self.form.codes, shape=shape)
                scales = name + self.form.scale_suffix
                yield TensorSlot(name=scales, dtype="float32", shape=self.form.scale_shape(shape))
            else:
                yield TensorSlot(name=name, dtype=self._kept_dtype(name), shape=shape)

    def table(self, tensors: Iterable[UploadTensor]) -> Iterator[UploadTensor]:
        """Yield the table of the tensors that ``convert`` makes of ``tensors``, in its order.

        Ignored tensors are left out. Codes, and a weight that is no matrix, stay unchanged: the service reports errors
        in them. Raises ValueError for stacked experts that cannot be split.
        """
        for tensor in tensors:
            if self._is_ignored(tensor.name):
                continue
            if tensor.dtype in CODE_DTYPES:
                yield tensor
                continue
            for made in self.becomes(tensor):
                yield UploadTensor(name=made.name, dtype=made.dtype, shape=made.shape)
                if made.scales is not None:
                    yield UploadTensor(name=made.scales, dtype="float32", shape=self.form.scale_shape(made.shape))

    def becomes(self, tensor: UploadTensor) -> Iterator[Becomes]:
        """Yield the tensors that ``convert`` makes of one tensor; none if it is ignored. A weight that is no matrix is
        kept.

        Raises InvalidManifest for codes of a tensor that stays in BF16, ValueError for stacked experts that cannot be
        split.
        """
        if self._is_ignored(tensor.name):
            return
        is_codes = tensor.dtype in CODE_DTYPES
        for piece in pieces(tensor.name, tensor.shape, self._experts):
            dtype, scales = self._kept_dtype(piece.name), None
            if is_codes:
                self._require_codes_of(piece.name, tensor.dtype)
                dtype = self.form.codes
            elif piece.name in self._quantized and len(piece.shape) == 2:
                dtype, scales = self.form.codes, piece.name + self.form.scale_suffix
            yield Becomes(piece.name, dtype, piece.shape, piece.index, scales)

    def largest_scale(self) -> float:
        """Return the scale of the largest BF16 weight. With a larger scale, the largest code would overflow."""
        largest = (torch.tensor(torch.finfo(torch.bfloat16).max, dtype=torch.float32) / self.form.largest_code).item()
        return 2.0 ** math.ceil(math.log2(largest)) if self.makes_powers_of_two else largest

    def convert(
        self, tensors: Iterable[Named], *, to_cpu: bool = True, checks: DeferredChecks | None = None
    ) -> Iterator[Named]:
        """Yield names on disk and tensors as stored, codes before their scales. Other tensors stay on their device.

        ``to_cpu``: codes and scales are on the CPU; otherwise on the device that made them, which may be a GPU.

        Ignored tensors are left out. Stacked experts are split. Codes and scales that the trainer made are checked and
        passed on. Reads ahead at most ``batch_bytes`` beyond the largest tensor.

        Raises QuantizationError with the first tensor and index of NaN, infinity, or a scale that the recipe does not
        allow; InvalidManifest for codes of a tensor that stays in BF16.

        ``checks``: tensors on a GPU are yielded once they are queued on the thread's own stream (``own_stream``), which
        must be the current one. Their numbers are checked on that stream, and ``DeferredChecks`` raises the errors
        later.
        """
        batch: list[Named] = []
        batch_bytes = 0
        for name, tensor in tensors:
            if self._is_ignored(name):
                continue
            part = whole = tensor.detach() if tensor.requires_grad else tensor
            for piece in pieces(name, tuple(whole.shape), self._experts):
                part = whole[piece.index] if piece.index else whole
                if batch and (batch_bytes + part.nbytes > self._batch_bytes or part.device != batch[-1][1].device):
                    yield from self._convert_batch(batch, to_cpu, checks)
                    batch, batch_bytes = [], 0
                batch.append((piece.name, part))
                batch_bytes += part.nbytes
            if whole.nbytes > self._batch_bytes:  # a view would keep all of the tensor alive
                yield from self._convert_batch(batch, to_cpu, checks)
                batch, batch_bytes = [], 0
            del tensor, whole, part  # free them before the generator makes the next
        yield from self._convert_batch(batch, to_cpu, checks)

    def _convert_batch(self, batch: list[Named], to_cpu: bool, checks: DeferredChecks | None) -> Iterator[Named]:
        quantized = [
            name in self._quantized and tensor.dim() == 2 and not is_codes(tensor)  # as ``becomes``
            for name, tensor in batch
        ]
        are_sound = self._sound_on_gpu(batch, list(compress(batch, map(not_, quantized))), checks)
        wanted = list(compress(batch, quantized))
        results = iter(self._quantizer.quantize(wanted, to_cpu=to_cpu, left_on_gpu=not to_cpu, checks=checks))
        for (name, tensor), is_quantized in zip(batch, quantized, strict=True):
            if is_quantized:
                codes, scales = next(results)
                yield name, codes
                yield name + self.form.scale_suffix, scales
            else:
                yield name, self._keep(name, tensor, is_sound=are_sound)

    def makes_scales(self, name: str) -> bool:
        """Return True if the tensor of that name holds scales of codes."""
        return name in self._scales

    def are_sound(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Check that these numbers may be stored in the tensor of that name: bool [], on their device.

        Only the tensor's dtype, and ``makes_scales``, decide that.
        """
        return self._are_sound([(name, numbers)])

    def _sound_on_gpu(self, batch: Sequence[Named], kept: Sequence[Named], checks: DeferredChecks | None) -> bool:
        """Check the unquantized tensors of a batch on the GPU, with one synchronization. Return True if they are valid,
        or if ``checks`` will report it.

        If False, ``_require_sound`` checks each tensor, and raises an error with its name and the reason.
        """
        if not kept or not all(lies_on_gpu(tensor) for _, tensor in kept):
            return False
        is_sound = self._are_sound(kept)
        if checks is None:
            return bool(is_sound)

        def require_all_sound() -> None:
            # the whole batch, so that the error names the first invalid tensor, not the first unquantized one
            for name, tensor in batch:
                self._require_sound(name, tensor)

        checks.add(is_sound, require_all_sound)
        return True

    def _are_sound(self, batch: Sequence[Named]) -> torch.Tensor:
        """Check that the numbers of all tensors are valid: bool [], on their device."""
        codes, scales, weights = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for name, tensor in batch:
            if is_codes(tensor):  # as integers, which torch can concatenate on any device
                codes.append(tensor if tensor.dtype == torch.int8 else tensor.view(torch.uint8))
            elif name in self._scales:
                scales.append(tensor)
            else:
                weights.append(tensor)
        found = [_are_numbers(several, self.form).all() for several in concatenate_small(codes)]
        for several in concatenate_small(scales):
            found += [sound.all() for sound, _ in self._scale_conditions(several)]
        if weights or not found:
            found.append(are_finite(weights or [tensor for _, tensor in batch]))
        return found[0] if len(found) == 1 else torch.stack(found).all()

    def _keep(self, name: str, tensor: torch.Tensor, *, is_sound: bool) -> torch.Tensor:
        """Return the tensor as stored. ``is_sound``: it was checked. Raises QuantizationError, InvalidManifest."""
        if are_codes := is_codes(tensor):
            self._require_codes_of(name, str(tensor.dtype).removeprefix("torch."))
        if not is_sound:
            self._require_sound(name, tensor)
        return tensor if are_codes else tensor.to(_TORCH[self._kept_dtype(name)])

    def _require_codes_of(self, name: str, dtype: str) -> None:
        if name not in self._quantized or dtype != self.form.codes:
            becomes = self.form.codes if name in self._quantized else self._kept_dtype(name)
            raise InvalidManifest(f"{name} came as {dtype} codes, but it becomes {becomes} here: send its weights")

    def _require_sound(self, name: str, tensor: torch.Tensor) -> None:
        """Raise QuantizationError for the first invalid number, under the conditions of ``_are_sound``."""
        if is_codes(tensor):
            _require_numbers(name, tensor, self.form)
        elif name in self._scales:
            for sound, complaint in self._scale_conditions(tensor):
                _require(name, tensor, sound, complaint)
        else:
            require_finite(tensor, name)

    def _scale_conditions(self, scales: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield conditions on scales: a mask of the scales that meet it, and a description of those that do not."""
        kind = "block scale" if self.form.in_blocks else "channel scale"
        yield torch.isfinite(scales) & (scales > 0), f"a {kind} that is not a positive number"
        yield scales >= _SMALLEST_SCALE, f"a {kind} that fp32 cannot hold as a normal number"
        largest = self.largest_scale()
        yield scales <= largest, f"a {kind} above {largest:.4g}, which no BF16 weight needs"
        if self.makes_powers_of_two:
            yield torch.frexp(scales.float()).mantissa == 0.5, "no power of two, as quant.scales asks for"

    def _kept_dtype(self, name: str) -> StoredDtype:
        return "float32" if name in self._float32 else "bfloat16"


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return little-endian bytes, row-major; without a copy if the tensor is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _are_numbers(codes: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Return for each code whether the quantizer could have made it."""
    return codes != _NO_INT8_CODE if form.codes == "int8" else codes.view(torch.uint8) & _NAN_CODE != _NAN_CODE


def _require_numbers(name: str, codes: torch.Tensor, form: WeightFormat) -> None:
    if form.codes == "int8":
        if codes.numel() and int(codes.min()) == _NO_INT8_CODE:
            _require(name, codes, _are_numbers(codes, form), "a code beyond those that are symmetric")
        return
    if codes.is_cuda or any_has_all_bits(np.frombuffer(tensor_bytes(codes), np.uint8), _NAN_CODE):
        _require(name, codes, _are_numbers(codes, form), "a code for NaN")


def _require(name: str, tensor: torch.Tensor, sound: torch.Tensor, complaint: str) -> None:
    if bool(sound.all()):
        return
    index = (~sound).nonzero()[0].tolist()
    value = tensor[tuple(index)].float().item()
    raise QuantizationError(
        f"{name}{index} is {value:g}, {complaint}: the version is refused; the one before stays live",
        {"tensor": name, "index": index, "count": int((~sound).sum())},
    )
