"""The conversations of agents, in tokens."""
