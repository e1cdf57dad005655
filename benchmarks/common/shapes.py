"""Published models as folders of a ``config.json``, and random weights of their size."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch


class Shape(StrEnum):
    """A published model."""

    QWEN3_8B = "qwen3-8b"
    QWEN3_30B_A3B = "qwen3-30b-a3b"
    QWEN3_32B = "qwen3-32b"


_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: dict[Shape, dict[str, Any]] = {  # as in the config.json of Qwen/Qwen3-8B, Qwen/Qwen3-32B and Qwen/Qwen3-30B-A3B
    Shape.QWEN3_8B: _QWEN3 | dict(zip(SIZES, (4096, 12288, 36, 32, 8), strict=True)),
    Shape.QWEN3_32B: _QWEN3 | dict(zip(SIZES, (5120, 25600, 64, 64, 8), strict=True)),
    Shape.QWEN3_30B_A3B: _QWEN3
    | dict(zip(SIZES, (2048, 6144, 48, 32, 4), strict=True))
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def write_config(name: Shape, folder: Path, layers: int | None = None) -> Path:
    """A folder that holds the model's config.json and nothing else; ``layers``: fewer of them."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def gaussian(shape: tuple[int, ...]) -> torch.Tensor:
    """Return BF16 of the size that trained weights have; on the GPU, if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
