"""LoRA adapters in PEFT's format, for small models."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.support.models import stored_shapes
from tests.support.telltale import telltale_adapter

RANK = 4
CONFIG: dict[str, object] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
}


def adapter_tensors(model: Path, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Return random matrices for every linear layer of a model but experts, whose product changes its outputs a lot."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, shape in stored_shapes(model).items():
        if not name.endswith("_proj.weight") or ".experts." in name:
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, shape[1], generator=generator) * shape[1] ** -0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], RANK, generator=generator) * scale
    return tensors


def telltale_of_all_layers(model: Path, number: int) -> dict[str, torch.Tensor]:
    """Return ``telltale_adapter`` with matrices of zeros for all other linear layers, for ``CONFIG``."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in adapter_tensors(model, 0).items()}
    return zeros | telltale_adapter(model, number, RANK)


def add_to(reference: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Make a reference model compute with an adapter, whose products read activations that are not rounded."""

    def keep_input(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        module.unrounded = inputs[0]

    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            b, module = (
                tensors[f"{path}.lora_B.weight"],
                reference.get_submodule(path.removeprefix("base_model.model.")),
            )
            change = 2.0 * b.bfloat16().float() @ a.bfloat16().float()
            module.register_forward_pre_hook(keep_input, prepend=True)
            module.register_forward_hook(lambda m, _, out, change=change: out + m.unrounded @ change.T)
    return reference


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    """Save an adapter as PEFT does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder
