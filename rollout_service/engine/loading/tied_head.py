"""An output head that is the embedding, and of which vLLM's CPU kernels keep a packed copy.

Loaders of some models (BLOOM's) know no tensor for a tied head, so no version brings one; and vLLM's layerwise reload
(0.32.0) processes only layers that received something. The head would go on computing with the weights of before.
"""

import torch

from rollout_service.vllm_internals import ParallelLMHead


def renew_tied_head(model: torch.nn.Module) -> None:
    """After a reload of a model whose head is tied: have vLLM pack the head's weights anew. On a GPU nothing is."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
