"""Trainers of other projects, each with this service and with its own engine: speed, mismatch and reward by step."""
