"""What the engine should compute, written again in plain transformers and fp32: the other side of the logprob tests."""

from pathlib import Path

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollout_service.engine.transfer import stored_tensors
from rollout_service.quant.blockwise import BLOCK, E4M3_MAX, dequantize_blockwise
from rollout_service.quant.recipe import SCALE_SUFFIX
from rollout_service.weights.manifest import read_manifest

FP8_KV = "sdpa_with_fp8_kv"


def _sdpa_with_fp8_kv(module, query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_attention_forward(module, query, _through_e4m3(key), _through_e4m3(value), *args, **kwargs)


AttentionInterface.register(FP8_KV, _sdpa_with_fp8_kv)


def reference_model(model_path: Path, version_folder: Path, *, fp8_activations: bool, fp8_kv: bool) -> PreTrainedModel:
    """The committed version in fp32: codes dequantized, inputs of quantized layers rounded to FP8 1×128 on the way."""
    config = AutoConfig.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=FP8_KV if fp8_kv else "sdpa"
    )
    stored = dict(stored_tensors(version_folder, read_manifest(version_folder)))
    quantized = {name for name in stored if name + SCALE_SUFFIX in stored}
    model.load_state_dict({n: _dequantized(n, stored) for n in stored if not n.endswith(SCALE_SUFFIX)})
    if fp8_activations:
        for name in quantized:
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(_quantize_input)
    return model.eval()


def reference_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """Natural-log probabilities, fp32 [len(completion)], of the completion's tokens at ``temperature``."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def _dequantized(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    scales = stored.get(name + SCALE_SUFFIX)
    return stored[name].float() if scales is None else dequantize_blockwise(stored[name], scales)


def _quantize_input(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    # the engine's activations are BF16 before they are quantized
    groups = inputs[0].to(torch.bfloat16).float().unflatten(-1, (-1, BLOCK))
    scales = (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-12)
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return ((codes.float() * scales).flatten(-2),)


def _through_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
