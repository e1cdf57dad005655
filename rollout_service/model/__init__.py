"""The served model without its weights: its tensors, and which of them are quantized."""
