"""Small random models of many families, saved as transformers saves them: Hugging Face folders that vLLM serves.

Every projection's dimensions are multiples of 128 (the FP8 block) and ``head_dim`` of 32 (what vLLM's FP8 KV cache on
the CPU asks for), but for DeepSeek's ``kv_a_proj_with_mqa``, whose last block is ragged as in the real model.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NUM_EXPERTS = 8
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_DIVISIBLE = {
    **SHAPE,
    "vocab_size": 65536,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""For tensor parallelism of 2: halves of these dimensions are multiples of the FP8 block, and the whole model is larger
than a half of it and the slack of a staging area. Halves of ``qwen3_moe_ep``'s experts are not."""

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=64),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, **_MOE, num_experts=NUM_EXPERTS, shared_expert_intermediate_size=256, norm_topk_prob=True
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **_MOE, num_experts=NUM_EXPERTS, head_dim=64, norm_topk_prob=True),
    "llama_tp": lambda: LlamaConfig(**_DIVISIBLE),
    "qwen3_tp": lambda: Qwen3Config(**_DIVISIBLE),
    "qwen3_moe_tp": lambda: Qwen3MoeConfig(
        **_DIVISIBLE, num_experts_per_tok=2, moe_intermediate_size=256, num_experts=NUM_EXPERTS, norm_topk_prob=True
    ),
    "qwen3_moe_ep": lambda: Qwen3MoeConfig(**_DIVISIBLE, **_MOE, num_experts=NUM_EXPERTS, norm_topk_prob=True),
    "qwen3_moe_group": lambda: Qwen3MoeConfig(
        **{**SHAPE, "num_attention_heads": 8},
        **_MOE,
        num_experts=NUM_EXPERTS,
        head_dim=128,  # group attention takes it, and 4 query heads for each KV head
        norm_topk_prob=True,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **_MOE,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",  # what makes vLLM expect e_score_correction_bias
        scoring_func="sigmoid",
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=512,  # with qk_rope_head_dim, what vLLM's latent attention takes on a CPU
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    ),
}


OF_EACH_CLASS = tuple(family for family in FAMILIES if not family.endswith(("_tp", "_ep", "_group")))
"""Without those that are the same classes with larger vocabularies."""


def config_of(family: str) -> PretrainedConfig:
    """The configuration of a family of ``FAMILIES``, with the name of its class."""
    config = FAMILIES[family]()
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


def make_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Save the BF16 model of a family of ``FAMILIES`` in ``folder``, without a tokenizer; returns the folder."""
    return _save(FAMILIES[family](), folder, seed)


def make_smallest_qwen3(folder: Path) -> Path:
    """Save a BF16 model whose linear layers are one FP8 block each, for Triton's interpreter; returns the folder."""
    smaller = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    return _save(Qwen3Config(**(SHAPE | smaller), head_dim=64), folder)


def _save(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the folder's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            shapes.update({name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()})  # noqa: SIM118
    return shapes


def random_weights(folder: Path, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Weights for the model in ``folder``, under its names on disk, whose distributions are far from uniform.

    Routers are decisive, or a rounding would change the choice of experts and with it a logprob by any amount: a token
    is large on one of ``NUM_EXPERTS`` channels, and each channel has two experts far above the others.

    ``device``: where they are made, other numbers on each; they come on the CPU.
    """
    with torch.device(device):
        generator = torch.Generator(device).manual_seed(seed)
        return {name: weight.cpu() for name, weight in _random_weights(stored_shapes(folder), generator).items()}


def _random_weights(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif name.endswith(".gate.weight"):
            noise = _decisive_router(shape, generator)
        elif "embed_tokens" in name:
            noise[:, :NUM_EXPERTS] = 16 * torch.eye(NUM_EXPERTS).repeat(len(noise) // NUM_EXPERTS, 1)
        elif name.endswith(("down_proj.weight", ".w2.weight")):
            noise *= 4 * shape[-1] ** -0.5
        elif name == LM_HEAD:
            noise *= 1.92 * shape[-1] ** -0.5
        else:
            noise *= 0.5 * shape[-1] ** -0.5
        weights[name] = 0.1 * noise if name.endswith("e_score_correction_bias") else noise.bfloat16()
    if LM_HEAD not in weights:
        weights[EMBEDDING] *= 0.12  # it is the head, too
    return weights


def _decisive_router(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    router = 0.02 * torch.randn(shape, generator=generator)
    order = torch.randperm(shape[0], generator=generator)
    for channel in range(NUM_EXPERTS):
        router[order[channel], channel] = 1.0
        router[order[(channel + 3) % NUM_EXPERTS], channel] = 0.85
    return router
