"""Tensors other than parameters: those held by objects that compute for layers, and buffers derived from weights.

vLLM's expert kernels keep references to the scales that they were created with. Its layerwise reload creates them again
while each layer has temporary parameters. It copies those into the live parameters and drops them, but the kernels keep
reading the temporaries. The bytes are equal then, and become stale with the next copy into the live parameters.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import xxhash

from rollout_service.compat.vllm_internals import hold, is_deferred_attention_layer, is_of_kv_cache

_LEAVES = (str, bytes, int, float, complex, type, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)
_NO_HOLDERS = (
    "asyncio.", "concurrent.", "enum.", "logging.", "threading.", "torch.", "transformers.",
    "vllm.compilation.", "vllm.config.", "vllm.distributed.",
)  # fmt: skip
"""Packages whose objects hold no weights but lead to many others, such as compiled graphs."""


class Unbound(Exception):
    """Raised when a reload left a tensor that matches no parameter, or changed a buffer. The message names it."""


@dataclass(frozen=True)
class Held:
    """A tensor, and the object that holds it."""

    module: torch.nn.Module
    path: str
    """Path from the module."""
    holder: object
    key: object
    """Attribute of ``holder``, or the key or index if it is a dict or a list."""
    tensor: torch.Tensor

    def replace(self, tensor: torch.Tensor) -> None:
        """Replace the tensor in ``holder``. Raises Unbound if that is not possible."""
        try:
            hold(self.holder, self.key, tensor)
        except (AttributeError, TypeError) as error:
            raise Unbound(f"{self.path} cannot be bound to the live parameter: {error}") from error


def held_tensors(model: torch.nn.Module) -> Iterator[Held]:
    """Yield the tensors reachable from attributes of the model's modules, except attributes that are tensors
    themselves."""
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and not isinstance(value, torch.Tensor):
                yield from _inside(module, f"{name}.{key}", value, seen)


def bind_to_parameters(model: torch.nn.Module, before: list[Held]) -> int:
    """Rebind tensors that a reload left outside the model to the live parameters with the same bytes.

    Returns the number of rebound tensors. Raises Unbound if a tensor equals no parameter. It is then derived from
    weights, and a copy into parameters would not renew it.

    ``before``: the tensors held before the reload; they are ignored.
    """
    old = {id(held.tensor) for held in before}
    live = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    left = [
        held
        for held in held_tensors(model)
        if id(held.tensor) not in old and held.tensor.numel() and held.tensor.untyped_storage().data_ptr() not in live
    ]
    for held in left:
        held.replace(_same_parameter(model, held))
    return len(left)


def buffer_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the digest of each buffer of the model, except those of the KV cache, which no version contains."""
    return {
        f"{prefix}.{leaf}" if prefix else leaf: _digest(buffer)
        for prefix, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if not (is_deferred_attention_layer(module) and is_of_kv_cache(leaf))
    }


def require_same_buffers(model: torch.nn.Module, before: Mapping[str, str]) -> None:
    """Raise Unbound if a buffer depends on the weights, because a copy into parameters would not renew it.

    ``before``: ``buffer_digests`` with the dummy weights, which differ from every version. With an earlier version's
    digests, a repeated version would look independent.
    """
    now = buffer_digests(model)
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            raise Unbound(f"{name} is a buffer that is made from weights, or loaded: a plan would leave it as it is")


def _digest(tensor: torch.Tensor) -> str:
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(held.numpy().data)


def _same_parameter(model: torch.nn.Module, held: Held) -> torch.Tensor:
    """Return the parameter with these bytes in the same module, or the only one in the model."""
    found: list[torch.nn.Parameter] = []
    for module in (held.module, model):
        found = [p for p in module.parameters(recurse=module is model) if _same(p, held.tensor)]
        if found:
            break
    if len(found) != 1:
        raise Unbound(f"{held.path} is made when weights are loaded, and equals {len(found)} parameters")
    return found[0]


def _same(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    a, b = parameter.detach(), tensor.detach()
    if (a.shape, a.stride(), a.dtype, a.device) != (b.shape, b.stride(), b.dtype, b.device):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _inside(module: torch.nn.Module, path: str, value: object, seen: set[int]) -> Iterator[Held]:
    """Yield the tensors inside an object. ``seen``: ids of visited objects, which the model keeps alive."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        for key, part, part_path in _parts(value, path):
            if isinstance(part, torch.Tensor):
                yield Held(module, part_path, value, key, part)
            else:
                waiting.append((part_path, part))


def _parts(value: object, path: str) -> Iterator[tuple[object, object, str]]:
    """Yield key, part and path of each object that ``value`` holds, without running the object's own code."""
    if isinstance(value, dict):
        yield from ((key, part, f"{path}[{key!r}]") for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((i, part, f"{path}[{i}]") for i, part in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((None, part, f"{path}()") for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield None, value.__self__, path
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield None, cell.cell_contents, f"{path}()"
    elif isinstance(value, torch.nn.Module) or not f"{type(value).__module__}.".startswith(_NO_HOLDERS):
        slots = (_slots(cls) for cls in type(value).__mro__)
        names = dict.fromkeys(name for of_class in slots for name in of_class)
        own = {name: getattr(value, name) for name in names if hasattr(value, name)}
        yield from ((name, part, f"{path}.{name}") for name, part in (own | getattr(value, "__dict__", {})).items())


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
