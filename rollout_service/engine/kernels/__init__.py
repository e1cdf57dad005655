"""Triton kernels of a decode step that replace vLLM's, and the compiler pass that puts them into its graphs."""
