"""GPU memory, streams and copies, and what nvidia-smi tells."""
