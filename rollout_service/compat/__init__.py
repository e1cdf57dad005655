"""Names of vLLM, Ray and transformers that they do not document, and the check that they are there."""
