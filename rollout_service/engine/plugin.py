"""Entry point of group ``vllm.general_plugins``: vLLM calls ``register`` in every process of an engine."""

import importlib

TRANSFER_BACKEND = "rollout_service_log"
"""Name under which our weight-transfer engine is registered with vLLM."""
STAGING_KEY = "rollout_service_staging"
"""Where vLLM's ``additional_config`` says which staging area the transfer engine has; missing: none."""
CPU_BLOCK_FP8, CPU_BF16 = "rollout_service_cpu_block_fp8", "rollout_service_cpu_bf16"
CPU_CHANNEL = "rollout_service_cpu_channel"
"""Names under which the quantization configurations of CPU engines are registered with vLLM."""
GROUP_ATTENTION = "rollout_service.engine.attention.backend.GroupAttentionBackend"
"""Where vLLM finds the attention backend that is ours."""
PARTIAL_PENALTIES = "rollout_service.engine.partial_penalties:PartialPenalties"
"""Where vLLM finds the logits processor that is ours."""


def register() -> None:
    """Register the transfer engine and, on a GPU, attention that reads a group's prompt once, on the CPU the
    quantization configurations. Safe to call again."""
    from rollout_service.engine.child_errors import log_to_stderr, tell_errors
    from rollout_service.engine.parent_death import die_with_parent

    die_with_parent()
    log_to_stderr()
    tell_errors()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    try:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "rollout_service.engine.loading.transfer", "LogWeightTransferEngine"
        )
    except ValueError as error:  # the factory's only way to say that the name is taken
        if "already registered" not in str(error):
            raise
    if current_platform.is_cpu():
        from rollout_service.engine.cpu.amx import request_amx

        importlib.import_module("rollout_service.engine.cpu.quant_config")  # it registers itself
        request_amx()
    else:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, GROUP_ATTENTION)
