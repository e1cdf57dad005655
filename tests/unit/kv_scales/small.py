"""Small random models of the families that calibration is for."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.models import FAMILIES


def small_model(family: str, kernel: str = "eager") -> PreTrainedModel:
    """In fp32, with norms and biases that are not all ones and zeros."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32, attn_implementation=kernel)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def tokens(seed: int) -> torch.Tensor:
    """[2, 12]"""
    return torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(seed))
