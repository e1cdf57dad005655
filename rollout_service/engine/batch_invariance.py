"""``VLLM_BATCH_INVARIANT`` in ``engine.env``: each sequence computed alike whatever else is in its batch."""

from rollout_service.config import ServiceConfig

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def is_batch_invariant(config: ServiceConfig) -> bool:
    """Whether vLLM is to compute each sequence alike whatever else is in its batch."""
    return config.engine.env.get(BATCH_INVARIANT, "0") != "0"


def refuse_batch_invariance(config: ServiceConfig, on_cpu: bool, has_experts: bool) -> None:
    """Raise ValueError if vLLM 0.32 would not keep it.

    Attention is FlashAttention's or Triton's, which do (``supports_batch_invariance``); where the model has latent
    attention, vLLM picks a kernel that does, or refuses.
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
