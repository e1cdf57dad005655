"""A rollout service that RL trainers of language models plug into."""

__version__ = "0.1.0"
