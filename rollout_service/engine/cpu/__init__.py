"""Numerics of vLLM's GPU kernels for FP8 and INT8 weights, implemented for the CPU."""
