"""How long a new version of the weights takes, from a trainer's bytes to every engine."""
