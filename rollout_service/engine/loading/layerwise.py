"""Find, report and complete the tensors that vLLM's layerwise reload misses or leaves unchanged."""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.overrides import TorchFunctionMode

from rollout_service.compat.vllm_internals import (
    ParallelLMHead,
    VocabParallelEmbedding,
    is_deferred_attention_layer,
    load_progress,
    load_whole,
    unpacked_convolution,
)

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class DirectCopies(TorchFunctionMode):
    """Turns each copy into a whole parameter of ``modules`` inside its context into a load of that parameter.

    During a layerwise reload parameters have no memory, and vLLM sees only the calls of their weight loaders. gpt-oss
    instead calls ``parameter.copy_(weight)`` for its experts and attention sinks. Such a copy would be lost without an
    error, and the module would keep its previous weights. Enter the context between the start of a reload and
    ``load_weights``. Copies into a part of a parameter are still lost; ``unloaded_modules`` reports them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """``modules``: those whose parameters' weight loaders are never called."""
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


def names_of_parameters(model: torch.nn.Module) -> dict[str, set[str]]:
    """Return all names of each parameter. vLLM's Transformers backend has some modules in two places. LoRA layers wrap
    others, whose weights are loaded under their own names."""
    by_identity: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), set()).update((name, name.replace(".base_layer.", ".")))
    return {name: names for names in by_identity.values() for name in names}


def incomplete_modules(model: torch.nn.Module) -> list[str]:
    """Return the modules that received only some of their weights in a reload: one expert of many, q without k.

    The result of ``load_weights`` does not tell, because one slice counts as the whole parameter there.
    """
    return [
        f"{name} ({loaded} of {wanted} elements)"
        for name, module in model.named_modules()
        # padding is never loaded, and scales of the KV cache are optional
        if not isinstance(module, VocabParallelEmbedding) and not is_deferred_attention_layer(module)
        for loaded, wanted in [load_progress(module)]
        if 0 < loaded < wanted
    ]


def renew_tied_head(model: torch.nn.Module) -> None:
    """After a reload, let vLLM's CPU kernels pack the head's weights again, for a model whose head is the embedding.

    The loaders of some models, such as BLOOM, know no tensor for a tied head, so no version has one. A reload processes
    only layers that received a tensor. The head would keep using the previous weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def renew_convolutions(model: torch.nn.Module) -> None:
    """After a reload, renew the view of the convolution's weight that a Mamba 2 layer takes when it is created.

    Packing the weight for the CPU moves it to other memory, so that the view keeps the weights of the first load.
    """
    for module in model.modules():
        seen = dict(module.named_buffers(recurse=False)).get("conv_weights")
        if seen is not None and (loaded := unpacked_convolution(module.conv1d)) is not None:
            seen.copy_(loaded)
