"""The digest that a version must have, computed without the package: formula, bytes, and JSON."""

import json
import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash

from tests.unit.quant import e4m3

QUANTIZED = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


def stored(weights: Mapping[str, torch.Tensor], fp8: bool = True) -> Iterator[tuple[str, str, list[int], bytes]]:
    """Name, dtype, shape and bytes of each tensor that engines load, by names on disk; projections are quantized."""
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if fp8 and QUANTIZED.search(name):
            codes, scales = e4m3.quantize(values)
            yield name, "float8_e4m3fn", list(codes.shape), codes.tobytes()
            yield f"{name}_scale_inv", "float32", list(scales.shape), scales.tobytes()
        elif name.endswith("e_score_correction_bias"):
            yield name, "float32", list(values.shape), values.tobytes()
        else:
            upper_half = (e4m3.bf16_rounded(values).view(np.uint32) >> 16).astype(np.uint16)
            yield name, "bfloat16", list(values.shape), upper_half.tobytes()


def digest(weights: Mapping[str, torch.Tensor], fingerprint: str, fp8: bool = True) -> str:
    """Of a version that holds ``weights``."""
    recipe = {"block": [128, 128], "not_converted": [], "weights": "fp8_block" if fp8 else "none"}
    tensors = sorted([n, d, s, xxhash.xxh3_128_hexdigest(data)] for n, d, s, data in stored(weights, fp8))
    content = {"delta_of": None, "fingerprint": fingerprint, "kv_scales": None, "recipe": recipe, "tensors": tensors}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
