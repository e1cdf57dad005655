"""The model that is served, without its weights: its tensors, and which of them are quantized."""
