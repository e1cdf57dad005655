"""The ``rollout-service`` command."""
