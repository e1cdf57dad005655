"""Undocumented names of vLLM, Ray and transformers that this package uses, and the check that they exist."""
