"""The engine replicas together: who is live, which of them gets a rollout, and how many there should be."""
