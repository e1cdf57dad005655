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
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import ScalingType, scaled_mm

from benchmarks.common.gpu_service import Mode
from benchmarks.common.results import Json
from benchmarks.common.timing import copy_seconds, event_seconds
from benchmarks.common.work import WorkOptions
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.blockwise import BLOCK

_BYTES = 2 << 30
_SIZE = 8192
_REPEATS = 20


@dataclass(frozen=True)
class GpuLimits:
    """Medians of one GPU."""

    bytes_per_s: float  # the faster of a copy, which reads and writes, and a sum, which only reads
    fp8_flops: float  # a product of two 8192×8192 matrices in FP8 with one scale each, by cuBLAS
    bf16_flops: float  # the same product in BF16


def gpu_limits() -> GpuLimits:
    """Measure the limits. It takes a second and 5 GB of GPU memory, so no engine should run meanwhile."""
    numbers = torch.ones(_BYTES // 4, device="cuda")
    read = _BYTES / _median(numbers.sum)
    del numbers
    copied = 2 * _BYTES / copy_seconds(_BYTES, "cuda", _REPEATS)
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    limits = GpuLimits(max(copied, read), _flops(*(x.to(torch.float8_e4m3fn) for x in (a, b))), _flops(a, b))
    del a, b
    torch.cuda.empty_cache()
    return limits


def _flops(a: torch.Tensor, b: torch.Tensor) -> float:
    one, way = torch.ones(1, device=a.device), ScalingType.TensorWise
    if a.dtype == torch.bfloat16:
        seconds = _median(lambda: a @ b.T)
    else:
        seconds = _median(lambda: scaled_mm(a, b.T, one, way, one, way, use_fast_accum=True))
    return 2 * len(a) * len(b) * a.shape[1] / seconds


def _median(call: Callable[[], object]) -> float:
    return statistics.median(event_seconds(call, _REPEATS))


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    nbytes: float  # bytes that are read
    flops: float  # operations. A multiplication and an addition are two.
    in_fp8: bool  # true if the operands are FP8, else BF16

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
