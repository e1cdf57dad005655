"""Entry point of group ``vllm.general_plugins``: vLLM calls ``register`` in every process of an engine."""

TRANSFER_BACKEND = "rollout_service_log"
"""Name under which our weight-transfer engine is registered with vLLM."""


def register() -> None:
    """Register the transfer engine and, on the CPU, the block-FP8 kernel. Safe to call again."""
    from rollout_service.engine.orphans import die_with_parent

    die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    try:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "rollout_service.engine.transfer", "LogWeightTransferEngine"
        )
    except ValueError as error:  # the factory's only way to say that the name is taken
        if "already registered" not in str(error):
            raise
    if current_platform.is_cpu():
        from rollout_service.engine.amx import request_amx
        from rollout_service.engine.cpu_block_gemm import CpuBlockScaledMM
        from rollout_service.engine.vllm_compat import prefer_cpu_block_kernel

        request_amx()
        prefer_cpu_block_kernel(CpuBlockScaledMM)
