"""Replicas that come and go under a trainer's load."""
