"""What an engine must hold once it has loaded a version: made from the trainer's weights without the ingest."""

import re

import torch

from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import FP8_BLOCK, INT8_CHANNEL, WeightFormat
from tests.support.probe import DECODED, digest

_QUANTIZED = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
_STACKED = re.compile(r"(?P<block>.*)\.experts\.(?P<expert>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj|w[123])\.")
_SHARDS = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2", "w1": "w13", "w3": "w13", "w2": "w2"}
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}
_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "w1", "up_proj", "w3", "q_a_proj", "kv_a_proj_with_mqa")


def quantize(
    weights: dict[str, torch.Tensor], *, skip: str = "(?!)", form: WeightFormat = FP8_BLOCK
) -> dict[str, torch.Tensor]:
    """The version's tensors: codes and scales of the projections but those that match ``skip``, the rest as it is."""
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if _QUANTIZED.search(name) and not re.search(skip, name):
            stored[name], stored[name + form.scale_suffix] = form.quantize(weight, name)
        else:
            stored[name] = weight
    return stored


def engine_digests(stored: dict[str, torch.Tensor]) -> dict[str, str]:
    """What ``Probe.weight_digests`` says of an engine with these tensors of a version."""
    held = engine_tensors(stored)
    for name in [name for name in held if held[name].itemsize == 1]:
        if name + FP8_BLOCK.scale_suffix in held:
            held[name + DECODED] = _decoded(held[name], held[name + FP8_BLOCK.scale_suffix])
        else:
            held[name + DECODED] = held[name].float() * held[name + INT8_CHANNEL.scale_suffix]
    return {name: digest(tensor) for name, tensor in held.items()}


def expert_digests(stored: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, str]:
    """The same of the routed experts alone, of which one of several ranks has its part whole."""
    experts = {name: tensor for name, tensor in engine_tensors(stored).items() if ".routed_experts." in name}
    return {name: digest(tensor.tensor_split(ranks)[rank]) for name, tensor in experts.items()}


def engine_tensors(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of vLLM's model, by its names: parts of a fused layer above one another, experts stacked."""
    parts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in stored.items():
        leaf = name.split(".")[-2]
        order = _ORDER.index(leaf) if leaf in _ORDER else 0
        expert = _STACKED.match(name)
        if expert:
            fused = f"{expert['block']}.experts.routed_experts.{_SHARDS[leaf]}_{name.rsplit('.', 1)[1]}"
            parts.setdefault(fused, {})[int(expert["expert"]), order] = tensor
        else:
            fused = name.replace(f".{leaf}.", f".{_FUSED.get(leaf, leaf)}.")
            parts.setdefault(fused, {})[0, order] = tensor
    return {name: _joined(name, found) for name, found in parts.items()}


def _joined(name: str, parts: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    experts = sorted({expert for expert, _ in parts})
    whole = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
    return torch.stack(whole) if ".routed_experts." in name else whole[0]


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape[-2:]
    per_weight = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return codes.float() * per_weight
