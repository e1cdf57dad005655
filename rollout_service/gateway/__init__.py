"""HTTP routes with validation and authorization, one module for each API.

The dispatcher of ``fleet/`` queues rollouts and sends them to replicas.
"""
