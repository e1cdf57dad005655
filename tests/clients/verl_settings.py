"""What ``verl_loop`` does, for the tests that look at it: they run where verl is not installed."""

STEPS = (0, 5, 6)
"""verl's global_steps at each update."""
LONG = 480
"""Tokens of a rollout across an update."""
