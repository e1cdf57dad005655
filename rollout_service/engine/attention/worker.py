"""What a replica asks vLLM's workers about attention (``engine/worker.py``)."""

from typing import TYPE_CHECKING, Any

from rollout_service.compat.vllm_internals import attention_layers
from rollout_service.engine.attention.choice import SHOWN

if TYPE_CHECKING:
    from rollout_service.engine.attention.reads import KVReads


class AttentionWorker:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: Any

    def attention_backends(self) -> list[str]:
        """Names of the kernels that the model's layers have."""
        layers = attention_layers(self.weight_transfer_engine.vllm_config)
        names = {layer.get_attn_backend().get_name() for layer in layers}
        return sorted(SHOWN.get(name, name) for name in names)

    def kv_reads(self) -> tuple[int, int]:
        """See ``KVReads.seen``; zeros where attention reads no group's prompt once."""
        layers = attention_layers(self.weight_transfer_engine.vllm_config)
        found = (getattr(getattr(layer, "impl", None), "reads", None) for layer in layers)
        counters: set[KVReads] = {reads for reads in found if reads is not None}  # layers of one kind share theirs
        seen = [counter.seen() for counter in counters]
        return sum(attended for attended, _ in seen), sum(spared for _, spared in seen)
