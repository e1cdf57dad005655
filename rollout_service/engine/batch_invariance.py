"""``VLLM_BATCH_INVARIANT`` in ``engine.env``: the result of a sequence does not depend on the rest of its batch."""

from rollout_service.config import ServiceConfig

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def is_batch_invariant(config: ServiceConfig) -> bool:
    """Return True if batch invariance is configured."""
    return config.engine.env.get(BATCH_INVARIANT, "0") != "0"


def refuse_batch_invariance(config: ServiceConfig, on_cpu: bool, has_experts: bool) -> None:
    """Raise ValueError if vLLM 0.32 does not support batch invariance for this configuration.

    The service uses FlashAttention or Triton attention, which support it (``supports_batch_invariance``). For latent
    attention, vLLM chooses a kernel that supports it, or refuses.
    """
    if not is_batch_invariant(config):
        return
    if on_cpu:
        raise ValueError(
            f"engine.env.{BATCH_INVARIANT} is set, and vLLM has no batch-invariant kernels for the CPU: leave it out"
        )
    if has_experts and config.quant.weights in ("fp8_block", "fp8_channel"):
        raise ValueError(
            f"engine.env.{BATCH_INVARIANT} is set, and vLLM does not keep it for experts in FP8 (its issues 57016 and "
            "57092): set quant.weights: none, or leave it out"
        )
