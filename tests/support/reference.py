"""What the engine should compute, written again in plain transformers and fp32: the other side of the logprob tests."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollout_service.engine.loading.stored_tensors import stored_tensors
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.experts import pieces
from rollout_service.quant.blockwise import BLOCK, E4M3_MAX
from rollout_service.quant.formats import WEIGHT_FORMATS, WeightFormat
from rollout_service.store.manifest import read_manifest
from tests.support.families import class_of

FP8_KV = "sdpa_with_fp8_kv"
_EXPERT = re.compile(r"(?P<layer>.*)\.(mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight")
_LAYER = re.compile(r"\.layers\.\d+\.")
_STACKED = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "gate_up_proj", "w3": "gate_up_proj"}


def _sdpa_with_fp8_kv(module, query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_attention_forward(module, query, _through_e4m3(key), _through_e4m3(value), *args, **kwargs)


AttentionInterface.register(FP8_KV, _sdpa_with_fp8_kv)


def reference_model(model_path: Path, version_folder: Path, *, fp8_activations: bool, fp8_kv: bool) -> PreTrainedModel:
    """The committed version in fp32: codes dequantized, inputs of quantized layers rounded to codes on the way.

    ``fp8_activations``: to FP8 1×128, or where the weights have a scale for each channel to their codes, by token.
    """
    config = AutoConfig.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=FP8_KV if fp8_kv else "sdpa"
    )
    stored = dict(stored_tensors(version_folder, read_manifest(version_folder)))
    quantized = _quantized(stored)
    model.load_state_dict(_as_held({n: _dequantized(n, stored) for n in _weights(stored)}))
    forms = {_form(name, stored).name: _form(name, stored) for name in quantized}
    through_codes = _through(*forms.values()) if forms else _through_groups
    if fp8_activations:
        for name in quantized:
            if not _EXPERT.fullmatch(name):
                model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(
                    lambda _, inputs: (through_codes(inputs[0]),)
                )
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.forward = _QuantizedExperts(module, through_codes)  # a plain attribute, which hides the method
    return model.eval()


def reference_of_any(
    model_path: Path, version_folder: Path, scratch: Path, *, dtype: torch.dtype, fp8_activations: bool
) -> PreTrainedModel:
    """The committed version in ``dtype``, read by transformers from a checkpoint of what its codes stand for.

    Of any family, since the names on disk are transformers' own. ``fp8_activations``: inputs of quantized layers are
    rounded to FP8 1×128 on the way, those of experts as they enter the experts only.
    """
    stored = dict(stored_tensors(version_folder, read_manifest(version_folder)))
    quantized = {name.removesuffix(".weight") for name in _quantized(stored)}
    scratch.mkdir(parents=True)
    shutil.copy(model_path / "config.json", scratch)
    tensors = {name: _dequantized(name, stored).contiguous() for name in _weights(stored)}
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    kind = class_of(AutoConfig.from_pretrained(scratch).model_type)
    model: PreTrainedModel = kind.from_pretrained(scratch, dtype=dtype, attn_implementation="eager")
    if not fp8_activations:
        return model.eval()
    naming = ServedModel.load(scratch).experts
    with_experts = {_LAYER.search(name)[0] for name in quantized if ".experts." in name}  # type: ignore[index]
    for name, module in model.named_modules():
        [weight] = pieces(f"{name}.weight", (), naming)
        of_experts = name.endswith(".experts") and any(layer in name for layer in with_experts)
        if weight.name.removesuffix(".weight") in quantized or of_experts:
            module.register_forward_pre_hook(_quantize_first_input)
    return model.eval()


class _QuantizedExperts:
    """Forward pass of a layer's stacked experts, the inputs of both products of each rounded to their codes."""

    def __init__(self, experts: torch.nn.Module, through_codes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._through_codes = through_codes
        self._gate_up, self._down, self._act = experts.gate_up_proj, experts.down_proj, experts.act_fn

    def __call__(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        inputs = self._through_codes(hidden)
        for expert in top_k_index.unique().tolist():
            token, rank = torch.where(top_k_index == expert)
            gate, up = linear(inputs[token], self._gate_up[expert]).chunk(2, dim=-1)
            result = linear(self._through_codes(self._act(gate) * up), self._down[expert])
            output.index_add_(0, token, top_k_weights[token, rank, None] * result)
        return output


def reference_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """Natural-log probabilities, fp32 [len(completion)], of the completion's tokens at ``temperature``."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def _quantized(stored: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in stored.items() if tensor.itemsize == 1}


def _weights(stored: dict[str, torch.Tensor]) -> list[str]:
    """All names but those of scales."""
    scales = {name + form.scale_suffix for name in _quantized(stored) for form in WEIGHT_FORMATS.values()}
    return [name for name in stored if name not in scales]


def _dequantized(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    if stored[name].itemsize > 1:
        return stored[name].float()
    form = _form(name, stored)
    return form.dequantize(stored[name], stored[name + form.scale_suffix])


def _form(name: str, stored: dict[str, torch.Tensor]) -> WeightFormat:
    [form] = [
        form
        for form in WEIGHT_FORMATS.values()
        if stored[name].dtype == form.dtype and name + form.scale_suffix in stored
    ]
    return form


def _as_held(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' own parameters: the experts of a layer stacked, gate above up, whatever the checkpoint says."""
    held: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name in sorted(weights):  # gate before up, w1 before w3
        found = _EXPERT.fullmatch(name)
        if found:
            stacked = f"{found['layer']}.mlp.experts.{_STACKED.get(found['leaf'], 'down_proj')}"
            experts.setdefault(stacked, {}).setdefault(int(found["expert"]), []).append(weights[name])
        else:
            held[name.replace(".block_sparse_moe.", ".mlp.")] = weights[name]
    for name, parts in experts.items():
        held[name] = torch.stack([torch.cat(parts[expert]) for expert in sorted(parts)])
    return held


def _quantize_first_input(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (_through_groups(inputs[0]).to(inputs[0].dtype), *inputs[1:])


def _through_groups(tensor: torch.Tensor) -> torch.Tensor:
    # the engine's activations are BF16 before they are quantized
    groups = tensor.to(torch.bfloat16).float().unflatten(-1, (-1, BLOCK))
    scales = (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-12)
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scales).flatten(-2)


def _through(form: WeightFormat) -> Callable[[torch.Tensor], torch.Tensor]:
    if form.in_blocks:
        return _through_groups

    def through_tokens(tensor: torch.Tensor) -> torch.Tensor:
        tokens = tensor.to(torch.bfloat16).float()
        scales = tokens.abs().amax(-1, keepdim=True).clamp(min=1e-12) / form.largest_code
        codes = (tokens / scales).clamp(-form.largest_code, form.largest_code)
        return (codes if form.dtype.is_floating_point else codes.round()).to(form.dtype).float() * scales

    return through_tokens


def _through_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
