"""The least that a decode step of a dense model can take on a GPU, by what it must read and compute.

A step of ``S`` sequences has three parts, whose kernels run one after another; the limit of a part is the longer of

    bytes that must be read ÷ measured bytes/s of memory
    operations ÷ measured operations/s of the tensor cores

and the limit of a step is the sum of the three:

    part             bytes                                          operations
    linear layers    Σ N·K · (1 + 4/128²) in FP8, Σ N·K · 2 in BF16   2 · S · Σ N·K, in what the weights are
    output head      V · H · 2                                      2 · S · V · H, in BF16
    attention        L · 2 · Hkv · D · (1 or 2) · tokens to read    4 · L · Hq · D · tokens attended to, as the cache

with N, K the shapes of the linear layers' weights, V the vocabulary, H the hidden size, L the layers, Hq and Hkv the
query and KV heads, and D their size. *Tokens to read* counts each group's prompt once, and what all begin with once;
*tokens attended to* counts them for each sequence. What is not counted: activations, norms, quantizing, writing the
cache, and sampling. All of that could at best hide behind the parts.
"""

import json
import math
from dataclasses import dataclass

from benchmarks.common.gpu_limits import GpuLimits
from benchmarks.common.gpu_service import Mode
from benchmarks.common.results import Json
from benchmarks.group_attention import Asked, kv_token_bytes
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.blockwise import BLOCK

LINEAR, HEAD, ATTENTION = "linear layers", "output head", "attention"


@dataclass(frozen=True)
class Part:
    """Of a step."""

    name: str
    nbytes: float
    """That must be read."""
    flops: float
    """Operations: a multiplication and an addition are two."""
    in_fp8: bool
    """Operands of the operations; else BF16."""

    def as_json(self, limits: GpuLimits) -> Json:
        """With milliseconds: of reading, of computing, and the longer of both."""
        reading = 1e3 * self.nbytes / limits.bytes_per_s
        computing = 1e3 * self.flops / (limits.fp8_flops if self.in_fp8 else limits.bf16_flops)
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "flops": self.flops,
            "in_fp8": self.in_fp8,
            "reading_ms": reading,
            "computing_ms": computing,
            "limit_ms": max(reading, computing),
        }


@dataclass(frozen=True)
class DecodedTokens:
    """The KV cache in one step."""

    read: float
    """Tokens that must be read, each once however many sequences attend to it."""
    attended: float
    """Tokens that all sequences attend to, summed."""


def tokens_at(asked: Asked, own: float) -> DecodedTokens:
    """When each sequence has made ``own`` tokens."""
    shared = asked.system_tokens + asked.groups * asked.prompt_tokens
    attended = asked.sequences * (asked.system_tokens + asked.prompt_tokens + own)
    return DecodedTokens(shared + asked.sequences * own, attended)


def own_tokens(asked: Asked, read: float) -> float:
    """That each sequence has made when the KV cache holds ``read`` tokens."""
    return max(0.0, read - asked.system_tokens - asked.groups * asked.prompt_tokens) / asked.sequences


def parts(model: ServedModel, mode: Mode, sequences: int, tokens: DecodedTokens) -> list[Part]:
    """Of a step. Raises ValueError for a mixture of experts, of which a step reads those that it happens to choose."""
    if model.num_experts:
        raise ValueError(f"{model.name} is a mixture of experts: the roofline is a dense model's")
    path = model.path
    shape = json.loads((path / "config.json").read_text())
    weights, head = sum(map(math.prod, model.linears.values())), math.prod(model.shapes[model.embedding])
    quantized = mode != Mode.BF16
    heads = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return [
        Part(LINEAR, weights * (1 + 4 / BLOCK**2 if quantized else 2), 2 * sequences * weights, quantized),
        Part(HEAD, 2 * head, 2 * sequences * head, in_fp8=False),
        Part(
            ATTENTION, kv_token_bytes(model.path, mode) * tokens.read, 4 * heads * tokens.attended, mode == Mode.FP8KV
        ),
    ]


def roofline(model: ServedModel, mode: Mode, sequences: int, tokens: DecodedTokens, limits: GpuLimits) -> Json:
    """All parts, and ``limit_ms`` of the step. Raises ValueError as ``parts``."""
    found = [part.as_json(limits) for part in parts(model, mode, sequences, tokens)]
    return {
        "tokens_read": tokens.read,
        "tokens_attended": tokens.attended,
        "parts": found,
        "limit_ms": sum(part["limit_ms"] for part in found),
    }
