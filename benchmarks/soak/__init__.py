"""Signals to any process at random moments, under load: nothing may be stale, lost, or away for long."""
