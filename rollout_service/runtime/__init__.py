"""Helpers that every process uses: calls between deployments, draining, tasks, threads, logs, connections."""
