"""Where things lie in the project."""

from pathlib import Path

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "benchmarks/results"
CPU_DEPLOYMENT = PROJECT / "deployments/cpu_rollout.yaml"
SHARED_MEMORY = Path("/dev/shm")  # a tmpfs: what is measured there is not the disk
