"""Weights for whom their values do not matter."""

import torch


def gaussian(shape: tuple[int, ...]) -> torch.Tensor:
    """BF16 of the size that trained weights have; on the GPU, if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
