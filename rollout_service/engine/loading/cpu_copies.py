"""Copies of weights that vLLM's CPU kernels compute with, and that its layerwise reload (0.32.0) leaves as they were.

On a GPU there are none.
"""

import torch

from rollout_service.compat.vllm_internals import ParallelLMHead, unpacked_convolution


def renew_tied_head(model: torch.nn.Module) -> None:
    """After a reload of a model whose head is the embedding: have vLLM pack the head's weights anew.

    Loaders of some models (BLOOM's) know no tensor for a tied head, so no version brings one; and only layers that
    received something are processed. The head would go on computing with the weights of before.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def renew_convolutions(model: torch.nn.Module) -> None:
    """After a reload: Mamba 2 computes with a view of its convolution's weight, taken when the layer was made.

    Packing the weight for the CPU puts it into other memory, so that the view has the weights of the first load.
    """
    for module in model.modules():
        seen = dict(module.named_buffers(recurse=False)).get("conv_weights")
        if seen is not None and (loaded := unpacked_convolution(module.conv1d)) is not None:
            seen.copy_(loaded)
