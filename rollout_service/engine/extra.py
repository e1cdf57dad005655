"""``engine.extra``: arguments of vLLM that a configuration may set in addition to the service's own settings.

An argument that the service controls is refused, with the setting to use instead. An argument that would break an
update is refused, too. An unknown name is refused with similar names. Based on vLLM 0.32, ``engine/arg_utils.py``.
``tests/unit/engine/test_extra.py`` compares ``INSTEAD`` with the arguments in ``args.py``.
"""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from transformers import AutoConfig
from vllm import AsyncEngineArgs

from rollout_service.config import ServiceConfig

_OTHER_FILES = "all processes read the model that model.path and model.revision name"
_PARALLEL = "which GPU holds which weights is what updates are planned by: set engine.tensor_parallel_size"
_NODES = "an engine lives in one replica on one node: set engine.tensor_parallel_size and scaling.max_replicas"
_ON_THE_DEVICE = "versions are copied into parameters on the device, which stay there"
_DRAFT = "give speculative_config"
_LOGS = "vLLM's lines go where Ray Serve's go: set Serve's logging_config"

INSTEAD: dict[str, str] = {
    "additional_config": "set engine.staging",
    "attention_backend": "set engine.attention_backend",
    "block_size": "set engine.block_size",
    "cudagraph_capture_sizes": "set engine.cuda_graph_sizes",
    "disable_log_stats": "the service counts by itself, see docs/metrics.md",
    "distributed_executor_backend": _NODES,
    "dtype": "versions are stored in BF16 and FP8",
    "enable_expert_parallel": "set engine.expert_parallel",
    "enable_prefix_caching": "it is on; weights.kv_cache_on_update says what a version does with it",
    "enable_sleep_mode": "set engine.enable_sleep_mode",
    "enforce_eager": "set engine.enforce_eager",
    "generation_config": "requests alone say how to sample",
    "gpu_memory_utilization": "set engine.gpu_memory_utilization",
    "kernel_config": "set engine.linear_backend; experts run on Triton's kernels, which read new weights",
    "kv_cache_dtype": "set kv_cache.dtype",
    "language_model_only": "of a multimodal model the language model alone is served",
    "load_format": "engines load versions of the log",
    "logging_config": _LOGS,
    "logprobs_mode": "logprobs are those of the distribution that was sampled from",
    "max_logprobs": "set engine.max_logprobs",
    "max_model_len": "set engine.max_model_len",
    "max_num_batched_tokens": "set engine.max_num_batched_tokens",
    "max_num_seqs": "set engine.max_num_seqs",
    "model": "set model.path",
    "reasoning_parser": "set chat.reasoning_parser",
    "return_sampling_mask": "set engine.return_sampling_mask",
    "enable_return_routed_experts": "set engine.return_routed_experts",
    "aux_output_config": "set engine.return_routed_experts",
    "scheduler_cls": "it is the service's",
    "scheduling_policy": "requests have a priority",
    "seed": "set engine.seed",
    "skip_tokenizer_init": "it is skipped where the model has no tokenizer",
    "tensor_parallel_size": "set engine.tensor_parallel_size",
    "weight_transfer_config": "versions come from the log",
    "worker_extension_cls": "it is the service's",
    # other names for the same settings
    "allow_deprecated_quantization": "set quant.weights",
    "linear_backend": "set engine.linear_backend",
    "log_config_file": _LOGS,
    "log_level": _LOGS,
    "max_cudagraph_capture_size": "set engine.cuda_graph_sizes",
    "moe_backend": "experts run on Triton's kernels, which read new weights after an update (vLLM issue 41670)",
    "override_generation_config": "requests alone say how to sample",
    "quantization": "set quant.weights",
    "quantization_config": "set quant.weights",
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    # arguments that the other processes would not know
    **dict.fromkeys(("code_revision", "config_format", "hf_config_path", "hf_token", "model_weights"), _OTHER_FILES),
    **dict.fromkeys(("revision", "tokenizer", "tokenizer_mode", "tokenizer_revision"), _OTHER_FILES),
    "served_model_name": "set model.served_name and model.aliases",
    "trust_remote_code": "code that comes with a model is not run here: the ingest, the gateways and the engines know "
    "models by the classes of transformers and vLLM. Use a model of theirs",
    # arguments that would break an update
    **dict.fromkeys(("enable_elastic_ep", "enable_ep_weight_filter", "enable_eplb", "eplb_config"), _PARALLEL),
    "expert_placement_strategy": _PARALLEL,
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank", "pipeline_parallel_size"), _NODES),
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group"),
        _ON_THE_DEVICE,
    ),
    **dict.fromkeys(("offload_params", "offload_prefetch_step"), _ON_THE_DEVICE),
    **dict.fromkeys(("kv_offloading_backend", "kv_offloading_size", "kv_transfer_config"), "set engine.kv_offload_gib"),
    "convert": "engines generate",
    **dict.fromkeys(("enable_lora", "max_cpu_loras", "max_loras"), "set engine.adapters.max_live"),
    "max_lora_rank": "set engine.adapters.max_rank",
    "lora_target_modules": "adapters may have all linear layers but experts",
    "runner": "engines generate",
    "worker_cls": "the worker is vLLM's own, with the service's extension",
}
"""Argument of vLLM that ``engine.extra`` may not set, mapped to the alternative."""

WEIGHTLESS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding without weights."""
POSITIONS = {"max_position_embeddings", "max_window_layers", "rope_parameters", "sliding_window", "use_sliding_window"}
"""Keys of a model's config.json that change no tensor, by their names in transformers 5. The older ``rope_scaling`` is
excluded, because setting it alone would lose ``rope_theta``."""
INDUCTOR = "inductor_compile_config"
"""Field of vLLM's CompilationConfig: options of torch.compile."""


def check_extra(config: ServiceConfig) -> None:
    """Raise ValueError for arguments that ``engine.extra`` may not set, as far as this is known without an engine."""
    extra = config.engine.extra
    known = [field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")]
    for name in extra:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            raise ValueError(
                f"engine.extra.{name}: vLLM's AsyncEngineArgs has no such field"
                + (f"; near are {', '.join(near)}" if near else ", and none of a name near it")
            )
        if name.startswith("data_parallel_"):
            raise ValueError(f"engine.extra.{name} is not taken: {_NODES}")
        if name in INSTEAD:
            raise ValueError(f"engine.extra.{name} is not taken: {INSTEAD[name]}")
    if (speculation := extra.get("speculative_config")) is not None:
        method = speculation.get("method") if isinstance(speculation, dict) else None
        if method not in WEIGHTLESS:
            raise ValueError(
                f"engine.extra.speculative_config.method is {method!r}: a draft model and heads of EAGLE, MTP or "
                "Medusa have weights of their own, which no version brings and no update reaches. Methods without "
                f"weights are {', '.join(WEIGHTLESS)}"
            )
    compilation = extra.get("compilation_config", {})
    if not isinstance(compilation, dict) or not isinstance(compilation.get(INDUCTOR, {}), dict):
        raise ValueError(
            f"engine.extra.compilation_config is {compilation!r}: give an object with fields of vLLM's "
            f"CompilationConfig, whose {INDUCTOR} is an object, too"
        )
    if not isinstance(extra.get("logits_processors", []), list):
        raise ValueError("engine.extra.logits_processors: give a list of names such as module:Class")
    _check_overrides(extra.get("hf_overrides", {}))


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, dict):
        raise ValueError(f"engine.extra.hf_overrides is {overrides!r}: give an object with keys of config.json")
    if not isinstance(overrides.get("rope_parameters", {}), dict):
        raise ValueError("engine.extra.hf_overrides.rope_parameters: give an object, such as {rope_type: yarn, …}")
    if "head_dtype" in overrides:
        raise ValueError("engine.extra.hf_overrides.head_dtype is not taken: set engine.lm_head")
    if others := sorted(overrides.keys() - POSITIONS):
        raise ValueError(
            f"engine.extra.hf_overrides.{others[0]} is not taken: the tensors of a version are those of the model's "
            f"own config.json. What changes none is taken: {', '.join(sorted(POSITIONS))}"
        )


def with_extra(owned: dict[str, Any], config: ServiceConfig, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine: ours and ``engine.extra``.

    Raises the errors of ``check_extra``, and ValueError for speculation on the CPU.
    """
    check_extra(config)
    extra: dict[str, Any] = dict(config.engine.extra)
    if on_cpu and extra.get("speculative_config") is not None:
        raise ValueError(
            "engine.extra.speculative_config: on the CPU vLLM 0.32 returns logprobs with it that are not numbers: "
            "leave it out"
        )
    overrides = {**extra.pop("hf_overrides", {}), **owned["hf_overrides"]}
    if "rope_parameters" in overrides:
        overrides["rope_parameters"] = _rope_parameters(config, overrides["rope_parameters"])
    ours, given = owned["compilation_config"], extra.pop("compilation_config", {})
    compilation = {**ours, **given, INDUCTOR: {**ours.get(INDUCTOR, {}), **given.get(INDUCTOR, {})}}
    processors = [*owned["logits_processors"], *extra.pop("logits_processors", [])]
    if twice := sorted(owned.keys() & extra.keys()):
        raise ValueError(f"engine.extra.{twice[0]} is not taken: the service sets it")
    merged = {"hf_overrides": overrides, "logits_processors": processors or None, "compilation_config": compilation}
    return {**owned, **extra, **merged}


def _rope_parameters(config: ServiceConfig, given: dict[str, object]) -> dict[str, object]:
    """Return the model's own parameters, such as ``rope_theta``, updated by the given ones. vLLM itself replaces all of
    them."""
    own = AutoConfig.from_pretrained(config.model.path).get_text_config().rope_parameters or {}
    if any(isinstance(value, dict) for value in own.values()):
        raise ValueError(
            f"engine.extra.hf_overrides.rope_parameters: {config.model.name} has some for each kind of layer "
            f"({', '.join(own)}), and such models keep theirs here: leave it out"
        )
    return {**own, **given}
