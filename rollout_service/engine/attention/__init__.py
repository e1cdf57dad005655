"""A vLLM attention backend whose decode steps read a group's shared prompt once, see docs/group_attention.md."""
