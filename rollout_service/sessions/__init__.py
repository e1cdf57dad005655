"""Token-exact records of agents' conversations."""
