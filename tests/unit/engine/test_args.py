"""What vLLM is told about quantization and attention."""

from pathlib import Path

import pytest
import torch
from vllm import AsyncEngineArgs
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from rollout_service.compat.vllm_scheduler import KeepingOffloadingConnector
from rollout_service.config import ServiceConfig
from rollout_service.config.engine import QuantConfig
from rollout_service.engine.args import COMPILER_PASS, default_graph_sizes, engine_args, not_converted
from rollout_service.engine.cpu.processor import why_no_fp8_cache
from rollout_service.engine.kernels.graph_pass import replace_quantizing_operators
from rollout_service.engine.plugin import CPU_CHANNEL, STAGING_KEY
from rollout_service.model.served_model import ServedModel
from tests.support.models import make_model

BY_CHANNEL = {
    "fp8_channel": ("float", "float-quantized", CompressedTensorsW8A8Fp8),
    "int8_channel": ("int", "int-quantized", CompressedTensorsW8A8Int8),
}
"""``quant.weights`` → compressed-tensors' type of numbers and format, and how vLLM loads and computes them."""


def args_of(path: Path, *not_converted: str, **sections: dict[str, object]) -> AsyncEngineArgs:
    fields = {"model": {"path": path}, "kv_cache": {"dtype": "bfloat16"}, **sections}
    return engine_args(ServiceConfig.model_validate(fields), not_converted, has_tokenizer=False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform is Hopper."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(9, 0))


def test_a_router_is_never_converted_although_it_is_in_no_plan(tmp_path):
    model = ServedModel.load(make_model(tmp_path, "qwen2_moe"))
    plan = model.plan(QuantConfig())
    told = not_converted(model, plan)
    routers = {f"model.layers.{n}.mlp.{gate}" for n in range(2) for gate in ("gate", "shared_expert_gate")}
    assert set(told) == routers
    assert not {f"{name}.weight" for name in told} & plan.quantized


def test_a_skipped_module_is_named_to_the_engine_and_blocks_only_with_quantization(llama):
    plan = ServedModel.load(llama).plan(QuantConfig(skip=("model.layers.1.self_attn.o_proj",)))
    told = args_of(llama, *not_converted(ServedModel.load(llama), plan)).hf_overrides["quantization_config"]
    assert told["modules_to_not_convert"] == ["model.layers.1.self_attn.o_proj"]
    assert told["weight_block_size"] == [128, 128] and told["activation_scheme"] == "dynamic"
    plain = args_of(llama, quant={"weights": "none"}).hf_overrides
    assert "weight_block_size" not in plain.get("quantization_config", {})


def test_settings_reach_vllm_as_they_are(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    for given in (None, 8192):
        assert args_of(tmp_path, engine={"max_num_batched_tokens": given}).max_num_batched_tokens == given
    for whole in (True, False):
        args = args_of(tmp_path, engine={"tensor_parallel_size": 2, "expert_parallel": whole})
        assert args.enable_expert_parallel is whole and args.tensor_parallel_size == 2
    adapters = args_of(tmp_path, engine={"adapters": {"max_live": 3, "max_rank": 64}})
    sizes = adapters.enable_lora, adapters.max_loras, adapters.max_cpu_loras, adapters.max_lora_rank
    assert sizes == (True, 4, 4, 64) and not args_of(tmp_path).enable_lora
    assert adapters.lora_target_modules == ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("weights", BY_CHANNEL)
def test_channels_are_a_format_of_ours_on_the_cpu(weights, llama):
    told = args_of(llama, "a", "b", quant={"weights": weights}).hf_overrides["quantization_config"]
    assert told == {"quant_method": CPU_CHANNEL, "weights": weights, "modules_to_not_convert": ["a", "b"]}


@pytest.mark.parametrize("weights", BY_CHANNEL)
@pytest.mark.usefixtures("gpu")
def test_channels_are_compressed_tensors_format_on_a_gpu(weights, llama):
    left = ("model.layers.0.mlp.experts", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj")
    args = args_of(llama, *left, quant={"weights": weights}, engine={"max_model_len": 512})
    read = CompressedTensorsConfig.from_config(args.hf_overrides["quantization_config"])
    numbers, stored_as, scheme_class = BY_CHANNEL[weights]

    def is_quantized(name: str) -> bool:
        scheme = read.get_scheme_dict(torch.nn.Linear(1, 1), f"model.layers.{name}")
        if scheme is not None:
            of_weights, of_inputs = scheme["weights"], scheme["input_activations"]
            assert of_weights.type == of_inputs.type == numbers and of_weights.num_bits == of_inputs.num_bits == 8
            assert (of_weights.strategy, of_inputs.strategy) == ("channel", "token")
        return scheme is not None

    assert read.quant_format == stored_as
    with set_current_vllm_config(VllmConfig(model_config=args.create_model_config())):
        chosen = read.get_scheme(torch.nn.Linear(1, 1), "model.layers.0.self_attn.q_proj")
    assert type(chosen) is scheme_class

    assert is_quantized("1.mlp.experts.0.gate_proj") and is_quantized("0.self_attn.q_proj")
    assert is_quantized("0.mlp.gate_up_proj") and not is_quantized("0.mlp.experts.0.gate_proj")
    assert not is_quantized("0.mlp.experts.12.down_proj")
    assert not is_quantized("0.mlp.gate") and not is_quantized("1.self_attn.q_proj")


def test_logits_in_fp32_are_vllms_head_dtype(llama):
    for lm_head, dtype in ({"lm_head": "float32"}, torch.float32), ({}, torch.bfloat16):
        made = args_of(llama, engine={"max_model_len": 512, **lm_head})
        assert made.create_model_config().head_dtype is dtype


def test_an_fp8_cache_of_latent_attention_is_refused_on_the_cpu(tmp_path):
    make_model(tmp_path, "deepseek_v3")
    with pytest.raises(ValueError, match=r"latent attention.*kv_cache.dtype: auto"):
        args_of(tmp_path, kv_cache={"dtype": "fp8_e4m3"})
    assert args_of(tmp_path).attention_backend == "CPU_MLA"


def test_an_fp8_cache_needs_one_of_two_features_of_a_cpu(llama, monkeypatch):
    neither = {"cpu_name": "a processor", "avx2": True, "avx512_f": False, "amx_tile": False}
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)

    def cache_dtype(dtype: str, **capabilities: object) -> str:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        return args_of(llama, kv_cache={"dtype": dtype}).kv_cache_dtype

    for feature in ("avx512_f", "amx_tile"):
        assert cache_dtype("fp8_e4m3", **neither | {feature: True}) == "fp8_e4m3"
    assert cache_dtype("bfloat16", **neither) == "auto"  # vLLM's name of the model's own dtype
    why = r"kv_cache\.dtype is fp8_e4m3, and .*\(a processor\) has neither: set it to auto or to bfloat16"
    for capabilities in (neither, {"cpu_name": "a processor", "architecture": "aarch64"}):
        with pytest.raises(ValueError, match=why):
            cache_dtype("fp8_e4m3", **capabilities)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert why_no_fp8_cache() is None


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_fp8_is_refused_with_what_to_set(llama, monkeypatch):
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(8, 0))
    why = r"compute capability 8\.0: it has no FP8.*set quant\.weights: int8_channel, or none"
    with pytest.raises(ValueError, match=why):
        args_of(llama)
    args = args_of(llama, quant={"weights": "none"})
    assert args.kv_cache_dtype == "auto" and args.attention_backend == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"staging": "device"}, "engine.staging is .*: set it to auto"),
        ({"attention_backend": "TRITON_ATTN"}, "engine.attention_backend is .*: set it to auto"),
        ({"cuda_graph_sizes": [1, 8]}, r"engine.cuda_graph_sizes is \[1, 8\].*no CUDA graphs: leave it out"),
        ({"return_sampling_mask": True}, r"engine.return_sampling_mask is true.*Model Runner V2.*not for the CPU"),
        ({"return_routed_experts": True}, r"engine.return_routed_experts is true.*Model Runner V2.*not for the CPU"),
        ({"kv_offload_gib": 2**-7}, r"kv_offload_gib is 0.0078125, and vLLM offloads the KV cache of GPUs alone"),
        ({"deterministic": True}, "no batch-invariant kernels for the CPU"),
        ({"linear_backend": "cutlass"}, "linear_backend is cutlass, and the CPU has no choice of kernels: leave it"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_what_only_a_gpu_has_is_refused_on_the_cpu(tmp_path, engine, why):
    make_model(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=why):
        args_of(tmp_path, engine=engine, weights={"kv_cache_on_update": "keep"})


@pytest.mark.usefixtures("gpu")
def test_what_only_a_gpu_has_reaches_vllm_there(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    asked = args_of(tmp_path, engine={"return_sampling_mask": True, "return_routed_experts": True})
    assert asked.return_sampling_mask and asked.enable_return_routed_experts
    plain = args_of(tmp_path)
    assert not plain.return_sampling_mask and not plain.enable_return_routed_experts
    assert plain.kv_transfer_config is None
    keep = {"kv_cache_on_update": "keep"}
    offloading = args_of(tmp_path, engine={"kv_offload_gib": 2**-7}, weights=keep).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(offloading) is KeepingOffloadingConnector
    assert offloading.kv_connector_extra_config == {"cpu_bytes_to_use": 2**23, "offload_prompt_only": False}
    with pytest.raises(ValueError, match=r"kv_offload_gib is 1e\+06, and /dev/shm has .* GiB free: set less"):
        args_of(tmp_path, engine={"kv_offload_gib": 1e6}, weights=keep)
    make_model(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"engine.return_routed_experts is true, and .* has no experts"):
        args_of(tmp_path, engine={"return_routed_experts": True})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("family", "weights", "taken"),
    [
        ("llama", "fp8_block", True),
        ("qwen3_moe", "none", True),
        ("qwen3_moe", "fp8_block", False),
        ("qwen3_moe", "fp8_channel", False),
    ],
)
def test_engines_are_deterministic_where_vllm_can_keep_that(tmp_path, family, weights, taken):
    make_model(tmp_path, family)
    sections = {"engine": {"deterministic": True}, "quant": {"weights": weights}}
    if taken:
        args_of(tmp_path, **sections)
        return
    with pytest.raises(ValueError, match=r"experts in FP8.*quant\.weights: none"):
        args_of(tmp_path, **sections)


def test_a_cpu_engine_stages_in_plain_memory_unless_disabled(llama):
    for staging, kind in (("auto", {STAGING_KEY: "memory"}), ("none", {})):
        assert args_of(llama, engine={"staging": staging}).additional_config == kind


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "count"), [(256, 512, 28), (1024, 512, 28), (20, 40, 7), (1, 2, 2)]
)
def test_default_graphs_cover_twice_the_sequences_up_to_512(max_num_seqs, largest, count):
    sizes = default_graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1], len(sizes)) == (1, largest, count)


@pytest.mark.usefixtures("gpu")
def test_graph_sizes_of_vllms_own_setting_are_left_to_vllm(llama):
    for compilation, sizes in (({"cudagraph_capture_sizes": [1, 8]}, None), ({"mode": 3}, default_graph_sizes(256))):
        made = args_of(llama, engine={"extra": {"compilation_config": compilation}, "max_num_seqs": 256})
        assert made.cudagraph_capture_sizes == sizes
    assert args_of(llama, engine={"cuda_graph_sizes": [1, 8]}).cudagraph_capture_sizes == [1, 8]
    with pytest.raises(ValueError, match=r"cuda_graph_sizes=\[1, 8\], but engine.enforce_eager"):
        args_of(llama, engine={"cuda_graph_sizes": [1, 8], "enforce_eager": True})


def test_compiled_engines_with_activations_in_blocks_run_our_kernels(llama, request):
    def passes(**sections: dict[str, object]) -> bool:
        return COMPILER_PASS in args_of(llama, **sections).compilation_config.inductor_compile_config

    assert not passes()
    request.getfixturevalue("gpu")
    assert passes()
    assert not passes(engine={"enforce_eager": True})
    assert not passes(quant={"weights": "none"}) and not passes(quant={"weights": "fp8_channel"})
    given = {"cudagraph_mode": "PIECEWISE", "inductor_compile_config": {"size_asserts": True}}
    found = args_of(llama, engine={"extra": {"compilation_config": given}}).compilation_config
    assert found.cudagraph_mode == CUDAGraphMode.PIECEWISE
    inductor = found.inductor_compile_config
    assert inductor["size_asserts"] is True and inductor[COMPILER_PASS].callable is replace_quantizing_operators
