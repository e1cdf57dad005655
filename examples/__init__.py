"""Trainers that use the service. ``grpo`` is the loop, ``grpo_digits`` what ``make demo`` runs."""
