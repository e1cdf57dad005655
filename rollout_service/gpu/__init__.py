"""GPU memory, streams and copies, and the output of nvidia-smi."""
