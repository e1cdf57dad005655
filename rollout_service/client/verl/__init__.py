"""A plugin for verl 0.9.1: rollouts from this service, weights over its upload client; see docs/trainers/verl.md.

verl imports ``plugin`` by itself, through the entry-point group ``verl.plugins``. Importing this package needs neither
verl nor ray; its other modules import verl.
"""
