"""An attention backend for vLLM in which decode reads a group's common prompt once: docs/group_attention.md."""
