"""Published models as folders of a ``config.json``: their shapes without their weights, which nothing here needs."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any


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
SHAPES: dict[Shape, dict[str, Any]] = {
    Shape.QWEN3_8B: _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    Shape.QWEN3_32B: _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    Shape.QWEN3_30B_A3B: _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""As in the config.json of Qwen/Qwen3-8B, Qwen/Qwen3-32B and Qwen/Qwen3-30B-A3B."""


def write_config(name: Shape, folder: Path, layers: int | None = None) -> Path:
    """A folder that holds the model's config.json and nothing else; ``layers``: fewer of them."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
