"""Support for models whose ``load_weights`` writes into parameters directly during vLLM's layerwise reload.

During that reload parameters have no memory, and vLLM sees only the calls of their weight loaders. gpt-oss instead
calls ``parameter.copy_(weight)`` for its experts and attention sinks. Such a copy would be lost without an error, and
the module would keep its previous weights.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.overrides import TorchFunctionMode

from rollout_service.compat.vllm_internals import is_deferred_attention_layer, load_progress, load_whole

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class DirectCopies(TorchFunctionMode):
    """Turns each copy into a whole parameter of ``modules`` inside its context into a load of that parameter.

    Enter it between the start of a layerwise reload and ``load_weights``. Copies into a part of a parameter are still
    lost; ``unloaded_modules`` reports them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Prepare the context. ``modules``: modules whose parameters' weight loaders are never called."""
        super().__init__()
        self._parameters = {
            id(parameter): (parameter, module, leaf)
            for module in modules
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        self._aliases: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Load a tensor that is copied into a parameter or its ``data``. Execute any other function."""
        found = self._parameters.get(id(args[0])) if args else None
        if found is not None and func is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
            _, module, leaf = found
            load_whole(module, leaf, args[1])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if found is not None and func == _DATA and isinstance(result, torch.Tensor):
            self._aliases.append(result)  # keeps the alias alive, because its id could be reused by another tensor
            self._parameters[id(result)] = found
        return result


def unloaded_modules(model: torch.nn.Module, expected: Collection[str]) -> dict[str, torch.nn.Module]:
    """Return the modules with a parameter in ``expected`` that received nothing in a layerwise reload.

    Call it after ``load_weights``, whose result is no help: it contains a name even if no weight loader was called.
    """
    return {
        prefix: module
        for prefix, module in model.named_modules()
        if not is_deferred_attention_layer(module)
        and load_progress(module)[0] == 0  # a complete module also has 0, but its parameters have memory again
        and any(
            parameter.is_meta and f"{prefix}.{leaf}" in expected
            for leaf, parameter in module.named_parameters(recurse=False)
        )
    }
