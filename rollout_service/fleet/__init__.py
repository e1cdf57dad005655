"""The engine replicas as a fleet: live replicas, routing of rollouts, and autoscaling."""
