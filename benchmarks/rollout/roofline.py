"""The shortest time in which a GPU can do a decode step, from the bytes it must read and the operations it must do.

A step of ``S`` sequences has four parts, whose kernels run one after another. The limit of a part is the longer of

    bytes to read ÷ measured bytes/s of memory
    operations ÷ measured operations/s of the tensor cores

and the limit of a step is their sum:

    part             bytes                                            operations
    linear layers    Σ N·K · (1 + 4/128²) in FP8, Σ N·K · 2 in BF16   2 · S · Σ N·K, in the dtype of the weights
    experts          the same, of the experts that a step chooses     2 · S · k · Σ N·K / E, likewise
    output head      V · H · 2                                        2 · S · V · H, in BF16
    attention        L · 2 · Hkv · D · (1 or 2) · tokens to read      4 · L · Hq · D · tokens attended to, as the cache

with N and K the shapes of the weights, V the vocabulary, H the hidden size, L the layers, Hq and Hkv the query and KV
heads, D their size, and k of E experts per token, chosen evenly: a step reads E · (1 - (1 - k/E)^S) of them.
*Tokens to read* counts each group's prompt once; *tokens attended to* counts it for each sequence. Activations, norms,
quantization, cache writes and sampling are not counted. At best, all of them hide behind the parts.
"""

import json
import math
from dataclasses import dataclass

from benchmarks.common.gpu_limits import GpuLimits
from benchmarks.common.gpu_service import Mode
from benchmarks.common.results import Json
from benchmarks.common.work import WorkOptions
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.blockwise import BLOCK


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    nbytes: float
    """Bytes that are read."""
    flops: float
    """Operations. A multiplication and an addition are two."""
    in_fp8: bool
    """True if the operands are FP8, else BF16."""

    def as_json(self, limits: GpuLimits) -> Json:
        """Return the part with the milliseconds of reading, of computing, and the longer of both."""
        reading = 1e3 * self.nbytes / limits.bytes_per_s
        computing = 1e3 * self.flops / (limits.fp8_flops if self.in_fp8 else limits.bf16_flops)
        return {
            "name": self.name,
            "gb": self.nbytes / 1e9,
            "reading_ms": reading,
            "computing_ms": computing,
            "limit_ms": max(reading, computing),
        }


def parts(model: ServedModel, mode: Mode, work: WorkOptions, own: float) -> list[Part]:
    """Return the parts of a step in which each sequence has ``own`` tokens of its completion."""
    shape = json.loads((model.path / "config.json").read_text())
    expert_weights = sum(math.prod(s) for name, s in model.linears.items() if ".experts." in name)
    weights = sum(map(math.prod, model.linears.values())) - expert_weights
    head = math.prod(model.shapes[model.embedding])
    quantized, sequences = mode != Mode.BF16, work.sequences
    weight_bytes = 1 + 4 / BLOCK**2 if quantized else 2
    prompts = work.groups * (work.prompt_min + work.prompt_max) / 2
    kv_bytes = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    kv_bytes *= 1 if mode == Mode.FP8KV else 2
    heads = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    found = [
        Part("linear layers", weights * weight_bytes, 2 * sequences * weights, quantized),
        Part("output head", 2 * head, 2 * sequences * head, in_fp8=False),
        Part(
            "attention",
            kv_bytes * (prompts + sequences * own),
            4 * heads * (prompts * work.n + sequences * own),
            mode == Mode.FP8KV,
        ),
    ]
    if expert_weights:
        used = shape["num_experts_per_tok"] / shape["num_experts"]
        chosen = expert_weights * (1 - (1 - used) ** sequences)
        found.append(Part("experts", chosen * weight_bytes, 2 * sequences * used * expert_weights, quantized))
    return found


def roofline(model: ServedModel, mode: Mode, work: WorkOptions, own: float, limits: GpuLimits) -> Json:
    """Return all parts, and the limit of the step as ``limit_ms``."""
    found = [part.as_json(limits) for part in parts(model, mode, work, own)]
    return {"parts": found, "limit_ms": sum(part["limit_ms"] for part in found)}
