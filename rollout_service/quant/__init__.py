"""Blockwise FP8: which tensors are quantized (``recipe``) and how (``blockwise``)."""
