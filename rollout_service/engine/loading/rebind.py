"""Tensors beside the parameters: those inside the objects that compute for layers, and buffers made from weights.

vLLM's expert kernels refer to the scales that they were made with. Its layerwise reload makes them anew while each
layer has temporary parameters, copies those into the live ones, and drops them; the kernels go on reading the
temporaries. Equal bytes then, and stale ones as soon as something else is copied into the live parameters.
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
"""Packages whose objects hold no weights, and lead far away: into compiled graphs, for one."""


class Unbound(Exception):
    """A reload left a tensor somewhere that is no parameter's, or changed a buffer; says where."""


@dataclass(frozen=True)
class Held:
    """A tensor, and where it is held."""

    module: torch.nn.Module
    path: str
    """From the module on."""
    holder: object
    key: object
    """Attribute of ``holder``, or its key or index if that is a dict or a list."""
    tensor: torch.Tensor

    def replace(self, tensor: torch.Tensor) -> None:
        """Have ``holder`` hold another. Raises Unbound where that cannot be."""
        try:
            hold(self.holder, self.key, tensor)
        except (AttributeError, TypeError) as error:
            raise Unbound(f"{self.path} cannot be bound to the live parameter: {error}") from error


def held_tensors(model: torch.nn.Module) -> Iterator[Held]:
    """Those that are reached from attributes of the model's modules; not the attributes that are tensors themselves."""
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and not isinstance(value, torch.Tensor):
                yield from _inside(module, f"{name}.{key}", value, seen)


def bind_to_parameters(model: torch.nn.Module, before: list[Held]) -> int:
    """Rebind tensors that a reload left outside the model to the live parameters with the same bytes.

    ``before``: what was held when the reload began, and concerns it no more. Returns how many were bound.
    Raises Unbound if one is no parameter's: it was made from weights, and a copy into parameters would not renew it.
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
    """Each buffer of the model → digest of its bytes, but for those of the KV cache, which no version brings."""
    return {
        f"{prefix}.{leaf}" if prefix else leaf: _digest(buffer)
        for prefix, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if not (is_deferred_attention_layer(module) and is_of_kv_cache(leaf))
    }


def require_same_buffers(model: torch.nn.Module, before: Mapping[str, str]) -> None:
    """Raise Unbound if a buffer is another than with other weights: a copy into parameters would not renew it.

    ``before``: ``buffer_digests`` with the dummy weights, which no version has; with an earlier version's, a version
    that repeats it would look as if nothing were derived.
    """
    now = buffer_digests(model)
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            raise Unbound(f"{name} is a buffer that is made from weights, or loaded: a plan would leave it as it is")


def _digest(tensor: torch.Tensor) -> str:
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(memoryview(held.numpy().data))


def _same_parameter(model: torch.nn.Module, held: Held) -> torch.Tensor:
    """Of the same module, if that has one with these bytes, else the only one in the model."""
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
    """``seen``: ids of the objects that were looked into already; the model keeps them alive."""
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
    """Key, part and path of each thing that an object holds; nothing of the object's own code is run."""
    if isinstance(value, dict):
        yield from ((key, part, f"{path}[{key!r}]") for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((i, part, f"{path}[{i}]") for i, part in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((None, part, f"{path}()") for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield None, value.__self__, path
    elif isinstance(value, types.FunctionType):
        yield from ((None, part, f"{path}()") for part in _closed_over(value))
    elif isinstance(value, torch.nn.Module) or not f"{type(value).__module__}.".startswith(_NO_HOLDERS):
        slots = (_slots(cls) for cls in type(value).__mro__)
        names = dict.fromkeys(name for of_class in slots for name in of_class)
        own = {name: getattr(value, name) for name in names if hasattr(value, name)}
        yield from ((name, part, f"{path}.{name}") for name, part in (own | getattr(value, "__dict__", {})).items())


def _closed_over(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
