"""Undocumented names of transformers that this package uses.

Nothing here replaces code of transformers: functions are registered through
``AttentionInterface``, which is documented, and removed again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""A function that ``AttentionInterface`` registers; returns the output, and weights if there are any."""


def attention_kernel(model: PreTrainedModel) -> str:
    """Return the name in the registry of the attention function that a model's layers call."""
    return str(model.config._attn_implementation)


@contextmanager
def registered_attention(kernel: str, wrap: Callable[[AttentionFunction | None], AttentionFunction]) -> Iterator[None]:
    """Replace the attention function ``kernel`` by ``wrap(function)`` within the context.

    ``wrap`` gets None for "eager", which is not in the registry: see ``eager_attention``.
    """
    original = ALL_ATTENTION_FUNCTIONS.get(kernel)
    if original is None:  # local entries of the registry can be removed
        ALL_ATTENTION_FUNCTIONS[kernel] = wrap(None)
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[kernel]
        return
    AttentionInterface.register(kernel, wrap(original))
    try:
        yield
    finally:
        AttentionInterface.register(kernel, original)


def eager_attention(module: torch.nn.Module) -> AttentionFunction:
    """Return the eager attention function in the model's own file, which is not in the registry. Raises ValueError if
    there is none."""
    for cls in type(module).__mro__:  # FSDP2 inserts a class of its own before the model's
        function: AttentionFunction | None = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager attention: load the model with attn_implementation='sdpa'")


def is_silu(activation: Callable[..., torch.Tensor]) -> bool:
    """Return True if a model's activation is SiLU, transformers' or torch's."""
    return isinstance(activation, (SiLUActivation, torch.nn.SiLU))


def kept_in_float32(model: PreTrainedModel) -> frozenset[str]:
    """Return parts of names of parameters that transformers keeps in fp32 with any dtype of the model."""
    return frozenset(model._keep_in_fp32_modules_strict or ())


def ignored_when_loading(model: PreTrainedModel) -> frozenset[str]:
    """Return regular expressions of checkpoint tensors that a model's class ignores, including those in its
    submodules."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("position_ids") for name, _ in model.named_buffers()):
        patterns.add(r"(^|\.)position_ids$")  # as PreTrainedModel._adjust_missing_and_unexpected_keys does
    return frozenset(patterns)


def as_saved(model: PreTrainedModel, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters as ``save_pretrained`` would write them: names on disk, experts as in the family's
    checkpoints.

    ``held``: some or all of the model's, by their names in memory; shapes may differ from the model's.
    """
    return dict(revert_weight_conversion(model, held))
