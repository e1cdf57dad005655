"""Entry point of group ``vllm.general_plugins``: vLLM calls ``register`` in every process of an engine."""

import importlib

TRANSFER_BACKEND = "rollout_service_log"
"""Name of our weight-transfer engine in vLLM."""
STAGING_KEY = "rollout_service_staging"
"""Key in vLLM's ``additional_config`` for the kind of staging buffer. Missing: no staging buffer."""
CPU_BLOCK_FP8, CPU_BF16 = "rollout_service_cpu_block_fp8", "rollout_service_cpu_bf16"
CPU_CHANNEL = "rollout_service_cpu_channel"
"""Names of the CPU engines' quantization configurations in vLLM."""
GROUP_ATTENTION = "rollout_service.engine.attention.backend.GroupAttentionBackend"
"""Import path of our attention backend."""
PARTIAL_PENALTIES = "rollout_service.engine.partial_penalties:PartialPenalties"
"""Import path of our logits processor."""


def register() -> None:
    """Register the transfer engine. On a GPU, also register group attention; on the CPU, the quantization
    configurations. May be called again."""
    from rollout_service.engine.processes import die_with_parent, log_to_stderr, skip_finalization, tell_errors

    die_with_parent()
    skip_finalization()
    log_to_stderr()
    tell_errors()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    try:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "rollout_service.engine.loading.transfer", "LogWeightTransferEngine"
        )
    except ValueError as error:  # the factory has no other way to report a duplicate name
        if "already registered" not in str(error):
            raise
    if current_platform.is_cpu():
        from rollout_service.engine.cpu.processor import request_amx

        importlib.import_module("rollout_service.engine.cpu.quant_config")  # the import registers the configurations
        request_amx()
    else:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, GROUP_ATTENTION)
