"""Renew copies of weights in vLLM's CPU kernels that its layerwise reload (0.32.0) leaves unchanged.

On a GPU there are no such copies.
"""

import torch

from rollout_service.compat.vllm_internals import ParallelLMHead, unpacked_convolution


def renew_tied_head(model: torch.nn.Module) -> None:
    """After a reload, let vLLM pack the head's weights again, for a model whose head is the embedding.

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
