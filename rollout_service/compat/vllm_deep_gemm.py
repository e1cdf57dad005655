"""Undocumented names of vLLM's DeepGEMM wrapper and of its warm-up. Imports little, for processes that only compile."""

import torch
from vllm.utils.deep_gemm import fp8_gemm_nt

__all__ = ["deep_gemm_sizes", "fp8_gemm_nt"]


def deep_gemm_sizes(model: torch.nn.Module, tokens: int) -> list[tuple[int, int, int]]:
    """Return the sizes that vLLM's warm-up multiplies: number of tokens, a weight's rows and its columns.

    ``tokens``: maximum number of tokens in a step.
    """
    from vllm.model_executor.warmup.deep_gemm_warmup import _deep_gemm_linear_data, _get_fp8_gemm_nt_m_values

    found = (_deep_gemm_linear_data(module) for module in model.modules())
    weights = {tuple(data[0].shape): data[0] for data in found if data is not None}
    return [
        (number, rows, columns)
        for (rows, columns), weight in weights.items()
        for number in _get_fp8_gemm_nt_m_values(weight, tokens)
    ]
