"""What every process needs: calls between deployments, draining, tasks, threads, logs, connections."""
