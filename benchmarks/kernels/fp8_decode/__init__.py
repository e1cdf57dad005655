"""A decode attention kernel for an FP8 KV cache, not yet used by engines, and what measures its variants."""
