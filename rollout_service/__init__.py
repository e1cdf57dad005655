"""A rollout service for RL trainers of language models."""

__version__ = "0.1.0"
