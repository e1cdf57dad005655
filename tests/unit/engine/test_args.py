"""What vLLM is told about quantization and attention."""

from pathlib import Path

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig, set_current_vllm_config
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
from rollout_service.engine.kernels.graph_pass import replace_quantizing_operators
from rollout_service.engine.plugin import CPU_CHANNEL, STAGING_KEY
from rollout_service.model.served_model import ServedModel
from tests.support.models import make_model

BY_CHANNEL = {
    "fp8_channel": ("float", "float-quantized", CompressedTensorsW8A8Fp8),
    "int8_channel": ("int", "int-quantized", CompressedTensorsW8A8Int8),
}
"""``quant.weights`` → compressed-tensors' type of numbers and format, and how vLLM loads and computes them."""


def _config(path: Path, **sections: dict[str, object]) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": {"path": path}, "kv_cache": {"dtype": "bfloat16"}, **sections})


def test_a_router_is_never_converted_although_it_is_in_no_plan(tmp_path):
    model = ServedModel.load(make_model(tmp_path, "qwen2_moe"))
    plan = model.plan(QuantConfig())
    told = not_converted(model, plan)
    routers = {f"model.layers.{n}.mlp.{gate}" for n in range(2) for gate in ("gate", "shared_expert_gate")}
    assert set(told) == routers
    assert not {f"{name}.weight" for name in told} & plan.quantized


def test_a_skipped_module_is_named_to_the_engine(tmp_path):
    model = ServedModel.load(make_model(tmp_path, "llama"))
    plan = model.plan(QuantConfig(skip=("model.layers.1.self_attn.o_proj",)))
    args = engine_args(_config(tmp_path), not_converted(model, plan), has_tokenizer=False)
    told = args.hf_overrides["quantization_config"]
    assert told["modules_to_not_convert"] == ["model.layers.1.self_attn.o_proj"]
    assert told["weight_block_size"] == [128, 128] and told["activation_scheme"] == "dynamic"


def test_whole_experts_on_each_rank_are_vllms_expert_parallelism(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    for whole in (True, False):
        engine = {"tensor_parallel_size": 2, "expert_parallel": whole}
        args = engine_args(_config(tmp_path, engine=engine), (), has_tokenizer=False)
        assert args.enable_expert_parallel is whole and args.tensor_parallel_size == 2


def test_without_quantization_nothing_is_said_of_blocks(tmp_path):
    make_model(tmp_path, "llama")
    args = engine_args(_config(tmp_path, quant={"weights": "none"}), (), has_tokenizer=False)
    assert "weight_block_size" not in args.hf_overrides.get("quantization_config", {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("weights", BY_CHANNEL)
def test_channels_are_a_format_of_ours_on_the_cpu(weights, tmp_path):
    make_model(tmp_path, "llama")
    args = engine_args(_config(tmp_path, quant={"weights": weights}), ("a", "b"), has_tokenizer=False)
    told = args.hf_overrides["quantization_config"]
    assert told == {"quant_method": CPU_CHANNEL, "weights": weights, "modules_to_not_convert": ["a", "b"]}


@pytest.mark.parametrize("weights", BY_CHANNEL)
def test_channels_are_compressed_tensors_format_on_a_gpu(weights, tmp_path, monkeypatch):
    make_model(tmp_path, "llama")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    left = ("model.layers.0.mlp.experts", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj")
    config = _config(tmp_path, quant={"weights": weights}, engine={"max_model_len": 512})
    args = engine_args(config, left, has_tokenizer=False)
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
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(9, 0))
    with set_current_vllm_config(VllmConfig(model_config=args.create_model_config())):
        chosen = read.get_scheme(torch.nn.Linear(1, 1), "model.layers.0.self_attn.q_proj")
    assert type(chosen) is scheme_class

    assert is_quantized("1.mlp.experts.0.gate_proj") and is_quantized("0.self_attn.q_proj")
    assert is_quantized("0.mlp.gate_up_proj") and not is_quantized("0.mlp.experts.0.gate_proj")
    assert not is_quantized("0.mlp.experts.12.down_proj")
    assert not is_quantized("0.mlp.gate") and not is_quantized("1.self_attn.q_proj")


@pytest.mark.parametrize("quant", ["fp8_block", "none"])
def test_logits_in_fp32_are_vllms_head_dtype(tmp_path, quant):
    make_model(tmp_path, "llama")

    def head_dtype(**engine: object) -> torch.dtype:
        config = _config(tmp_path, quant={"weights": quant}, engine={"max_model_len": 512, **engine})
        return engine_args(config, (), has_tokenizer=False).create_model_config().head_dtype

    assert head_dtype(lm_head="float32") is torch.float32
    assert head_dtype() is torch.bfloat16


def test_an_fp8_cache_of_latent_attention_is_refused_on_the_cpu(tmp_path):
    make_model(tmp_path, "deepseek_v3")
    with pytest.raises(ValueError, match=r"latent attention.*kv_cache.dtype: auto"):
        engine_args(_config(tmp_path, kv_cache={"dtype": "fp8_e4m3"}), (), has_tokenizer=False)
    assert engine_args(_config(tmp_path), (), has_tokenizer=False).attention_backend == "CPU_MLA"


def test_a_gpu_without_fp8_is_refused_with_what_to_set(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(8, 0))
    with pytest.raises(
        ValueError, match=r"compute capability 8\.0: it has no FP8.*set quant\.weights: int8_channel, or none"
    ):
        engine_args(_config(tmp_path), (), has_tokenizer=False)
    args = engine_args(_config(tmp_path, quant={"weights": "none"}), (), has_tokenizer=False)
    assert args.kv_cache_dtype == "auto" and args.attention_backend == "FLASH_ATTN"


@pytest.mark.parametrize("field", [{"staging": "device"}, {"staging": "host"}, {"attention_backend": "TRITON_ATTN"}])
def test_what_only_a_gpu_has_is_refused_on_the_cpu(tmp_path, field):
    make_model(tmp_path, "llama")
    with pytest.raises(ValueError, match=f"engine.{next(iter(field))} is .*: set it to auto"):
        engine_args(_config(tmp_path, engine=field), (), has_tokenizer=False)


def test_a_cpu_engine_stages_in_plain_memory_unless_disabled(tmp_path):
    make_model(tmp_path, "llama")
    for staging, kind in (("auto", {STAGING_KEY: "memory"}), ("none", {})):
        args = engine_args(_config(tmp_path, engine={"staging": staging}), (), has_tokenizer=False)
        assert args.additional_config == kind


def test_cuda_graphs_are_refused_on_the_cpu(tmp_path):
    make_model(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"engine.cuda_graph_sizes is \[1, 8\].*no CUDA graphs: leave it out"):
        engine_args(_config(tmp_path, engine={"cuda_graph_sizes": [1, 8]}), (), has_tokenizer=False)


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "count"), [(256, 512, 28), (1024, 512, 28), (20, 40, 7), (1, 2, 2)]
)
def test_default_graphs_cover_twice_the_sequences_up_to_512(max_num_seqs, largest, count):
    sizes = default_graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1], len(sizes)) == (1, largest, count)


def test_graph_sizes_of_vllms_own_setting_are_left_to_vllm(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(9, 0))
    for compilation, sizes in (({"cudagraph_capture_sizes": [1, 8]}, None), ({"mode": 3}, default_graph_sizes(256))):
        config = _config(tmp_path, engine={"extra": {"compilation_config": compilation}, "max_num_seqs": 256})
        assert engine_args(config, (), has_tokenizer=False).cudagraph_capture_sizes == sizes


def test_compiled_engines_with_activations_in_blocks_run_our_kernels(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")

    def passes(**sections: dict[str, object]) -> bool:
        return COMPILER_PASS in compiler(**sections).inductor_compile_config

    def compiler(**sections: dict[str, object]) -> CompilationConfig:
        return engine_args(_config(tmp_path, **sections), (), has_tokenizer=False).compilation_config

    assert not passes()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(9, 0))
    assert passes()
    assert not passes(engine={"enforce_eager": True})
    assert not passes(quant={"weights": "none"}) and not passes(quant={"weights": "fp8_channel"})
    given = {"cudagraph_mode": "PIECEWISE", "inductor_compile_config": {"size_asserts": True}}
    found = compiler(engine={"extra": {"compilation_config": given}})
    assert found.cudagraph_mode == CUDAGraphMode.PIECEWISE
    inductor = found.inductor_compile_config
    assert inductor["size_asserts"] is True and inductor[COMPILER_PASS].callable is replace_quantizing_operators


def test_cuda_graphs_and_an_eager_engine_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match=r"cuda_graph_sizes=\[1, 8\], but engine.enforce_eager"):
        _config(tmp_path, engine={"cuda_graph_sizes": [1, 8], "enforce_eager": True})


def test_the_tokens_of_a_step_are_vllms_choice_unless_given(tmp_path):
    make_model(tmp_path, "llama")
    for given in (None, 8192):
        args = engine_args(_config(tmp_path, engine={"max_num_batched_tokens": given}), (), has_tokenizer=False)
        assert args.max_num_batched_tokens == given


def test_sampling_masks_are_passed_to_vllm_but_refused_on_cpu(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")
    masks = _config(tmp_path, engine={"return_sampling_mask": True})
    with pytest.raises(ValueError, match=r"engine.return_sampling_mask is true.*Model Runner V2.*not for the CPU"):
        engine_args(masks, (), has_tokenizer=False)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert engine_args(masks, (), has_tokenizer=False).return_sampling_mask
    assert not engine_args(_config(tmp_path), (), has_tokenizer=False).return_sampling_mask


def test_routed_experts_are_passed_to_vllm_but_refused_without_experts_and_on_the_cpu(tmp_path, monkeypatch):
    make_model(tmp_path, "qwen3_moe")
    asked = _config(tmp_path, engine={"return_routed_experts": True})
    with pytest.raises(ValueError, match=r"engine.return_routed_experts is true.*Model Runner V2.*not for the CPU"):
        engine_args(asked, (), has_tokenizer=False)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert engine_args(asked, (), has_tokenizer=False).enable_return_routed_experts
    assert not engine_args(_config(tmp_path), (), has_tokenizer=False).enable_return_routed_experts
    make_model(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"engine.return_routed_experts is true, and .* has no experts"):
        engine_args(asked, (), has_tokenizer=False)


def test_offloading_has_our_connector_and_is_refused_on_the_cpu(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")
    keep = {"kv_cache_on_update": "keep"}
    config = _config(tmp_path, engine={"kv_offload_gib": 2**-7}, weights=keep)
    with pytest.raises(
        ValueError, match=r"engine.kv_offload_gib is 0.0078125, and vLLM offloads the KV cache of GPUs alone"
    ):
        engine_args(config, (), has_tokenizer=False)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    offloading = engine_args(config, (), has_tokenizer=False).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(offloading) is KeepingOffloadingConnector
    assert offloading.kv_connector_extra_config == {"cpu_bytes_to_use": 2**23, "offload_prompt_only": False}
    assert engine_args(_config(tmp_path), (), has_tokenizer=False).kv_transfer_config is None
    with pytest.raises(ValueError, match=r"kv_offload_gib is 1e\+06, and /dev/shm has .* GiB free: set less"):
        engine_args(_config(tmp_path, engine={"kv_offload_gib": 1e6}, weights=keep), (), has_tokenizer=False)


def test_engines_have_lora_layers_only_where_adapters_are_served(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    assert not engine_args(_config(tmp_path), (), has_tokenizer=False).enable_lora
    adapters = {"max_live": 3, "max_rank": 64}
    args = engine_args(_config(tmp_path, engine={"adapters": adapters}), (), has_tokenizer=False)
    assert (args.enable_lora, args.max_loras, args.max_cpu_loras, args.max_lora_rank) == (True, 4, 4, 64)
    assert args.lora_target_modules == ["k_proj", "o_proj", "q_proj", "v_proj"]
