"""How many GPUs an engine of a published model may have: where whole 128×128 blocks of its layers fit each of them.

    python -m benchmarks.families.published     no weights, no engine, no GPU: config.json's numbers and vLLM's classes

Writes benchmarks/results/<machine>/published.json and the second table of docs/models.md.
"""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json
from benchmarks.common.shapes import SHAPES, SIZES, Shape
from benchmarks.families.table import write_tables
from rollout_service.config import QuantConfig
from rollout_service.model.served_model import ServedModel

WAYS = (1, 2, 4, 8)  # sizes of an engine, in GPUs


def _dense(model_type: str, vocabulary: int, *sizes: int) -> Json:
    about = {"model_type": model_type, "vocab_size": vocabulary, "tie_word_embeddings": False}
    return about | dict(zip(SIZES, sizes, strict=True))


_GLM: Json = {"model_type": "glm4_moe", "head_dim": 128, "tie_word_embeddings": False, "attention_bias": True}
MODELS: dict[str, Json] = {
    "Llama-3.1-8B": _dense("llama", 128256, 4096, 14336, 32, 32, 8),
    "Llama-3.1-70B": _dense("llama", 128256, 8192, 28672, 80, 64, 8),
    "Qwen2.5-7B": _dense("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Qwen2.5-32B": _dense("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "Qwen2.5-72B": _dense("qwen2", 152064, 8192, 29568, 80, 64, 8),
    "Qwen3-8B": SHAPES[Shape.QWEN3_8B],
    "Qwen3-14B": _dense("qwen3", 151936, 5120, 17408, 40, 40, 8) | {"head_dim": 128},
    "Qwen3-32B": SHAPES[Shape.QWEN3_32B],
    "Qwen3-30B-A3B": SHAPES[Shape.QWEN3_30B_A3B],
    "Qwen3-235B-A22B": SHAPES[Shape.QWEN3_30B_A3B]
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "Qwen3-Next-80B-A3B": {"model_type": "qwen3_next", "intermediate_size": 5120, "tie_word_embeddings": False},
    "Mixtral-8x7B": {"model_type": "mixtral", "tie_word_embeddings": False},
    "GLM-4.5-Air": _GLM,
    "GLM-4.5": _GLM
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
    },
    "gpt-oss-120b": {"model_type": "gpt_oss", "tie_word_embeddings": False},
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "tie_word_embeddings": False,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "DeepSeek-V3": {"model_type": "deepseek_v3", "tie_word_embeddings": False, "topk_method": "noaux_tc"},
}
"""Name → what its config.json says; what is left out is transformers' own default, which is that model's number."""


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    """A folder with a config.json of these settings."""
    config = AutoConfig.for_model(**settings)
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def reading(name: str, folder: Path) -> Json:
    """Return what the service would make of the model in ``folder``, for each of ``WAYS``."""
    model = ServedModel.load(folder)
    outside = {model.head, model.embedding}
    linears = {n: math.prod(s) for n, s in model.shapes.items() if len(s) > 1 and n not in outside}

    def share(ways: int, expert_parallel: bool) -> Json:
        try:
            plan = model.plan(QuantConfig(indivisible="keep_bf16"), ways, expert_parallel)
        except ValueError as refusal:
            return {"refusal": str(refusal).replace(f"{folder}: ", ""), "fp8": 0.0}
        quantized = sum(linears[weight] for weight in plan.quantized)
        return {"refusal": None, "fp8": quantized / sum(linears.values())}

    layouts = [False, True] if model.num_experts else [False]
    ways = [{"gpus": w, "expert_parallel": e, **share(w, e)} for w in WAYS for e in layouts if w > 1 or not e]
    return {"model": name, "parameters": sum(map(math.prod, model.shapes.values())), "ways": ways}


def readings() -> Iterator[Json]:
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            yield reading(name, write_config(Path(place) / name, settings))


def main() -> None:
    """Read them; write the result and the table."""
    cases = []
    for case in readings():
        print(case["model"], flush=True)
        cases.append(case)
    results.write("published", {"cases": cases})
    write_tables()


if __name__ == "__main__":
    run(main)
