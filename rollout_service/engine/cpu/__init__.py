"""What vLLM lacks on the CPU: the numerics of its GPU kernels for FP8 weights."""
