"""The attention methods that a replica calls on vLLM's workers (``engine/worker.py``)."""

from typing import TYPE_CHECKING, Any

from rollout_service.compat.vllm_internals import attention_layers
from rollout_service.engine.attention.choice import SHOWN

if TYPE_CHECKING:
    from rollout_service.engine.attention.grouping import KVReads


class AttentionWorker:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: Any

    def attention_backends(self) -> list[str]:
        """Return the names of the attention backends of the model's layers."""
        layers = attention_layers(self.weight_transfer_engine.vllm_config)
        names = {layer.get_attn_backend().get_name() for layer in layers}
        return sorted(SHOWN.get(name, name) for name in names)

    def kv_reads(self) -> tuple[int, int]:
        """Return ``KVReads.read``, or zeros if the backend reads no prompt once for its group."""
        layers = attention_layers(self.weight_transfer_engine.vllm_config)
        found = (getattr(getattr(layer, "impl", None), "reads", None) for layer in layers)
        counters: set[KVReads] = {reads for reads in found if reads is not None}  # layers of one kind share a counter
        reads = [counter.read() for counter in counters]
        return sum(attended for attended, _ in reads), sum(spared for _, spared in reads)
