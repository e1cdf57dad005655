"""Small configurations of many families of models: those that vLLM 0.32 serves and transformers 5 can make.

Dimensions are multiples of 128 (the FP8 block) where a family lets them be, so that what does not divide is the
family's own doing. ``models.py`` has those that ``model/engine_layout.py`` knows by a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from tests.support.models import NUM_EXPERTS, SHAPE

_TOKENS: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE: dict[str, Any] = {**SHAPE, **_TOKENS}
_HEADS: dict[str, Any] = {**_SHAPE, "head_dim": 64}
_TIED: dict[str, Any] = {**_HEADS, "tie_word_embeddings": True}
_GPT: dict[str, Any] = {**_TOKENS, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_CHOSEN: dict[str, Any] = {"num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {**_HEADS, **_CHOSEN, "num_experts": NUM_EXPERTS, "moe_intermediate_size": 128}
_LOCAL: dict[str, Any] = {**_SHAPE, **_CHOSEN, "num_local_experts": NUM_EXPERTS}
_ROUTED: dict[str, Any] = {
    **_HEADS,
    **_CHOSEN,
    "n_routed_experts": NUM_EXPERTS,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    **{name: value for name, value in _ROUTED.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

DENSE: dict[str, dict[str, Any]] = {
    "apertus": _SHAPE,
    "arcee": _SHAPE,
    "bloom": {**_TOKENS, "hidden_size": 256, "n_layer": 2, "n_head": 4},
    "cohere": {**_SHAPE, "tie_word_embeddings": True},
    "cohere2": {**_TIED, "sliding_window": 512},
    "cwm": _HEADS,
    "ernie4_5": _HEADS,
    "exaone4": {**_HEADS, "sliding_window": 512, "sliding_window_pattern": 2},
    "falcon": {
        **_TOKENS,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "gemma": _TIED,
    "gemma2": {**_TIED, "query_pre_attn_scalar": 64, "sliding_window": 512},
    "gemma3_text": {**_TIED, "query_pre_attn_scalar": 64, "sliding_window": 512},
    "glm": {**_HEADS, "partial_rotary_factor": 0.5},
    "glm4": {**_HEADS, "partial_rotary_factor": 0.5},
    "gpt2": _GPT,
    "gpt_neox": _SHAPE,
    "granite": _SHAPE,
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "jais2": _SHAPE,
    "ministral3": _HEADS,
    "nemotron": _SHAPE,
    "olmo": _SHAPE,
    "olmo2": _SHAPE,
    "olmo3": _SHAPE,
    "opt": {**_SHAPE, "ffn_dim": 512, "word_embed_proj_dim": 256, "tie_word_embeddings": True},
    "phi": _SHAPE,
    "phi3": _SHAPE,
    "seed_oss": _HEADS,
    "smollm3": _SHAPE,
    "stablelm": _SHAPE,
    "starcoder2": {**_SHAPE, "sliding_window": None},
}
"""``model_type`` → its settings; attention throughout."""

STATE_SPACE: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **_HEADS,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
    "lfm2": {
        **_SHAPE,
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 384,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {
        **_TOKENS,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
    },
    "qwen3_5_text": {**_HEADS, **_LINEAR_ATTENTION},
}
"""Dense models with layers that are no attention."""

MIXTURES: dict[str, dict[str, Any]] = {
    "cohere2_moe": {**_EXPERTS, "tie_word_embeddings": True},
    "dots1": _ROUTED,
    "ernie4_5_moe": {
        **_HEADS,
        "moe_num_experts": NUM_EXPERTS,
        "moe_k": 2,
        "moe_intermediate_size": 128,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    },
    "flex_olmo": {**_SHAPE, **_CHOSEN, "num_experts": NUM_EXPERTS},
    "glm4_moe": _ROUTED,
    "gpt_oss": {**_HEADS, **_CHOSEN, "num_local_experts": NUM_EXPERTS, "sliding_window": 128},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {**_LOCAL, "shared_intermediate_size": 256, "layer_types": ["attention", "attention"]},
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 256},
    "hunyuan_v1_moe": {**_HEADS, "num_experts": NUM_EXPERTS, "moe_topk": 2},
    "jamba": {
        **_SHAPE,
        **_CHOSEN,
        "num_experts": NUM_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "llama4_text": {
        **_HEADS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 1,
        "intermediate_size": 128,
        "intermediate_size_mlp": 384,
        "moe_layers": [0, 1],
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 128,
    },
    "mellum": _EXPERTS,
    "minimax_m2": {
        **_HEADS,
        **_CHOSEN,
        "num_local_experts": NUM_EXPERTS,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "olmoe": {**_SHAPE, **_CHOSEN, "num_experts": NUM_EXPERTS},
    "phimoe": _LOCAL,
    "qwen3_5_moe_text": {**_EXPERTS, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 128},
    "qwen3_next": {**_EXPERTS, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 128},
    "deepseek_v32": {
        **_LATENT,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
        "topk_method": "noaux_tc",  # what makes vLLM expect e_score_correction_bias
    },
    "glm4_moe_lite": _LATENT,
}
"""Those with routed experts."""

_SPECIAL: dict[str, Any] = {
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "tie_word_embeddings": False,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 256,
}
_VISION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TIED, "query_pre_attn_scalar": 64, "sliding_window": 512},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "glm4v": {
        **_SPECIAL,
        "text_config": {**_HEADS, **_MROPE, "partial_rotary_factor": 1.0},
        "vision_config": {**_QWEN_VISION, "image_size": 28},
    },
    "llava": {
        "text_config": {**_HEADS, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 3,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {**_HEADS, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral"},
        "image_token_index": 3,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        **_SPECIAL,
        "text_config": {**_SHAPE, **_MROPE},
        "vision_config": {"depth": 1, "embed_dim": 128, "hidden_size": 256, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **_SPECIAL,
        "text_config": {**_SHAPE, **_MROPE},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        **_SPECIAL,
        "text_config": {**_HEADS, **_MROPE},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_vl_moe": {
        **_SPECIAL,
        "text_config": {**_EXPERTS, **_MROPE, "norm_topk_prob": True},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}
"""Those with a vision tower, of which the language model is served."""

FAMILIES = DENSE | STATE_SPACE | MIXTURES | MULTIMODAL


HALVES_DIVIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
"""Settings for tensor parallelism of 2: halves of these dimensions are multiples of the FP8 block."""


def config_of(family: str, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """The small configuration of a family of ``FAMILIES``, with the name of its class.

    ``changes``: of its settings; those that the family does not have are left out.
    """
    settings = FAMILIES[family]
    known = AutoConfig.for_model(family, **settings).to_dict().keys()
    taken = {name: value for name, value in (changes or {}).items() if name in known}
    config = AutoConfig.for_model(family, **settings | taken)
    with torch.device("meta"):
        config.architectures = [type(class_of(family).from_config(config)).__name__]
    return config


def class_of(family: str) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Which of transformers' classes makes models of the family."""
    return AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM


def make_family(folder: Path, family: str, *, seed: int = 0, changes: Mapping[str, Any] | None = None) -> Path:
    """Save a random BF16 model of a family in ``folder``, without a tokenizer; returns the folder.

    ``changes``: see ``config_of``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(family).from_config(config_of(family, changes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def family_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights for the model in ``folder``, by its names on disk, whose distributions are far from uniform.

    Vectors stay near what transformers begins with, since families mean different things by them. Matrices keep a
    token's scale, routers among them: of large logits a sigmoid leaves equal scores, which every kernel orders its way.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    stored = load_file(folder / "model.safetensors")
    is_tied = not any("lm_head" in name or "embed_out" in name for name in stored)
    for name, initial in stored.items():
        noise = torch.randn(initial.shape, generator=generator)
        if name.endswith(".sinks"):
            weight = noise  # gpt-oss: logits beside those of the keys
        elif initial.ndim < 2:
            weight = initial * (1 + 0.1 * noise)
        elif "embed" in name or ".wte." in name or ".wpe." in name:
            weight = noise * initial.shape[-1] ** -0.5 if is_tied else noise  # as a head it would leave one token only
        else:
            weight = noise * initial.shape[-1] ** -0.5
        weights[name] = weight.to(initial.dtype)
    return weights
