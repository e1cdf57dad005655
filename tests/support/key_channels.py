"""The same model with other keys: powers of two move from q to k, which changes nothing but what a KV cache holds."""

from pathlib import Path

import torch

from tests.support.models import random_weights

HEAD_DIM = 64
"""Of the models that these are made for."""
LOUD = 2.0**11
"""Keys of order 1 become keys of order 2048, far beyond the 448 that FP8 ends at."""


def with_key_factors(weights: dict[str, torch.Tensor], factors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights with keys multiplied by ``factors``, powers of two [head_dim], and queries divided by them.

    Rotary embedding turns channel i with channel i + head_dim/2: both must have the same factor, or it is another
    model. For attention without a norm of q and k. Logits are equal bit for bit wherever k and q stay in range.
    """
    half = len(factors) // 2
    assert torch.equal(factors[:half], factors[half:]), "channels that are turned together need one factor"
    changed = dict(weights)
    for name, tensor in weights.items():
        for projection, by in (("k_proj", factors), ("q_proj", 1 / factors)):
            if f".{projection}." in name:
                heads = tensor.unflatten(0, (-1, len(factors)))
                shape = (len(factors), 1) if tensor.ndim == 2 else (len(factors),)
                changed[name] = (heads * by.view(shape).to(tensor.dtype)).flatten(0, 1)
    return changed


def loud_weights(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Random ones with keys of order 1000, far beyond 448, and logits of attention of order 2."""
    weights = {n: w * 8 if ".q_proj." in n else w for n, w in random_weights(model_path, seed).items()}
    return with_key_factors(weights, torch.full((HEAD_DIM,), LOUD))


def uneven_weights(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Random ones with a few huge key channels and many tiny ones, which no scale of a whole tensor can save."""
    factors = torch.full((HEAD_DIM,), 2.0**-12)
    factors[[5, 6, 5 + HEAD_DIM // 2, 6 + HEAD_DIM // 2]] = 2.0**12
    return with_key_factors(random_weights(model_path, seed), factors)
