"""Quantization of weights to FP8 or INT8, blockwise or channelwise."""
