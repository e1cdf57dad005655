"""``engine.deterministic``: the result of a sequence does not depend on the rest of its batch."""

from rollout_service.config import ServiceConfig


def refuse_batch_invariance(config: ServiceConfig, on_cpu: bool, has_experts: bool) -> None:
    """Raise ValueError if vLLM 0.32 does not support ``engine.deterministic`` for this configuration.

    The service uses FlashAttention or Triton attention, which support it (``supports_batch_invariance``). For latent
    attention, vLLM chooses a kernel that supports it, or refuses.
    """
    if not config.engine.deterministic:
        return
    if on_cpu:
        raise ValueError(
            "engine.deterministic is true, and vLLM has no batch-invariant kernels for the CPU: leave it out"
        )
    if has_experts and config.quant.weights in ("fp8_block", "fp8_channel"):
        raise ValueError(
            "engine.deterministic is true, and vLLM does not keep it for experts in FP8 (its issues 57016 and 57092): "
            "set quant.weights: none, or leave it out"
        )
