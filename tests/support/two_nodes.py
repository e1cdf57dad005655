"""The service on several Ray nodes of this machine, each with a folder of its own for weight versions."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from rollout_service.app import build
from rollout_service.local import APPLICATION, LocalService, free_port, load_config
from rollout_service.store.log import WeightLog

DEPLOYMENT = Path(__file__).parents[2] / "deployments/cpu_rollout.yaml"
ROOT_VARIABLE = "ROLLOUT_WEIGHTS"
OBJECT_STORE_BYTES = 200 << 20
HEAD = "head"


class Nodes:
    """Ray nodes that each have room for one engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self.add(HEAD)

    @property
    def address(self) -> str:
        """To connect to."""
        return str(self._cluster.address)

    def root(self, name: str) -> Path:
        """``weights.root`` as the processes of that node see it."""
        return self._folder / name

    def add(self, name: str) -> None:
        """Another node; the first is the head."""
        self._nodes[name] = self._cluster.add_node(
            include_dashboard=False,
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={ROOT_VARIABLE: str(self.root(name))},
        )

    def kill(self, name: str) -> None:
        """All its processes at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def drain(self, name: str, deadline_s: int) -> None:
        """Have Ray told that the node ends then, as by an autoscaler whose machine is taken back."""
        told = {
            "--address": self.address,
            "--node-id": self._nodes[name].node_id,
            "--reason": "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message": "the machine is taken back",
            "--deadline-remaining-seconds": str(deadline_s),
        }
        command = Path(sys.executable).with_name("ray")
        subprocess.run([command, "drain-node", *(word for option in told.items() for word in option)], check=True)

    def copies(self, name: str) -> WeightLog:
        """What a node without the log has fetched."""
        (log,) = self.root(name).glob("copies/*")
        return WeightLog(log)

    def stop(self) -> None:
        """End them all."""
        self._cluster.shutdown()


@contextmanager
def service_on_two_nodes(
    folder: Path, second: str, settings: dict[str, dict[str, Any]] | None = None
) -> Iterator[tuple[LocalService, Nodes]]:
    """The shipped CPU deployment with a replica on each of two nodes: the head, which has the log, and ``second``.

    ``settings``: laid over it.
    """
    overrides: dict[str, dict[str, Any]] = {
        "model": {"path": folder / "tiny-qwen3"},
        "engine": {"admission_limit": 256},
        "scaling": {"min_replicas": 2, "max_replicas": 2, "num_cpus": 1},
        "weights": {
            "root": f"${ROOT_VARIABLE}",
            "ingest_resources": {"node:__internal_head__": 0.001},
            "part_bytes": 256 << 10,
            "poll_s": 1.0,
        },
    }
    for section, fields in (settings or {}).items():
        overrides[section] = overrides.get(section, {}) | fields
    config, port, nodes = load_config(DEPLOYMENT, overrides), free_port(), Nodes(folder)
    try:
        ray.init(address=nodes.address, namespace="serve", log_to_driver=False)
        nodes.add(second)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build(config), name=APPLICATION, route_prefix="/")
        yield LocalService(f"http://127.0.0.1:{port}", config.resolved(), metrics_targets=()), nodes
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.stop()
