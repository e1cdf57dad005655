"""Trainers that use the service; ``grpo_digits`` is what ``make demo`` runs."""
