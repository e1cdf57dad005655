"""Models whose ``load_weights`` writes into parameters itself, as part of vLLM's layerwise reload.

During that reload parameters have no memory, and vLLM notices only what their weight loaders are given. gpt-oss does
``parameter.copy_(weight)`` for its experts and attention sinks instead. That would be lost without an error: the module
would keep the weights that it had.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.overrides import TorchFunctionMode

from rollout_service.compat.vllm_internals import is_deferred_attention_layer, load_progress, load_whole

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class DirectCopies(TorchFunctionMode):
    """Takes each copy into a whole parameter of ``modules``, done inside its context, as the load of that parameter.

    Enter it between the beginning of a layerwise reload and ``load_weights``. Copies into a part of a parameter stay
    lost; ``unloaded_modules`` tells of them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """``modules``: none of whose parameters has a weight loader that is called."""
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
        """Load what is copied into a parameter, or into its ``data``; let everything else happen."""
        found = self._parameters.get(id(args[0])) if args else None
        if found is not None and func is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
            _, module, leaf = found
            load_whole(module, leaf, args[1])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if found is not None and func == _DATA and isinstance(result, torch.Tensor):
            self._aliases.append(result)  # or its id would be another tensor's soon
            self._parameters[id(result)] = found
        return result


def unloaded_modules(model: torch.nn.Module, expected: Collection[str]) -> dict[str, torch.nn.Module]:
    """After ``load_weights`` of a layerwise reload: modules with a parameter in ``expected`` that received nothing.

    The names that ``load_weights`` returns do not tell: they are added whether or not a weight loader was called.
    """
    return {
        prefix: module
        for prefix, module in model.named_modules()
        if not is_deferred_attention_layer(module)
        and load_progress(module)[0] == 0  # as of one that is complete, whose parameters have memory again
        and any(
            parameter.is_meta and f"{prefix}.{leaf}" in expected
            for leaf, parameter in module.named_parameters(recurse=False)
        )
    }
