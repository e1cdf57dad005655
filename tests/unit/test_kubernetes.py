"""The KubeRay manifest: Ray's autoscaler reads it, and what several places say agrees. No cluster runs here."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import GPU, args_of, read_document

PROJECT = Path(__file__).parents[2]
MANIFEST = PROJECT / "deployments/kubernetes/rayservice.yaml"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    _, service = yaml.safe_load_all(MANIFEST.read_text())
    return dict(service)


@pytest.fixture(scope="module")
def cluster(service: dict[str, Any]) -> dict[str, Any]:
    return dict(service["spec"]["rayClusterConfig"])


@pytest.fixture(scope="module")
def config(service: dict[str, Any]) -> ServiceConfig:
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(document)
    return ServiceConfig.model_validate(args_of(document))


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_ray_s_autoscaler_reads_the_cluster(service, config):
    resource = {"metadata": {"name": "rollout", "namespace": "default"}, "spec": service["spec"]["rayClusterConfig"]}
    read = _derive_autoscaling_config_from_ray_cr(resource)
    head, gpu = read["available_node_types"]["headgroup"], read["available_node_types"]["gpu"]
    assert head["resources"]["CPU"] == 0 and "GPU" not in head["resources"]
    gpus = gpu["resources"]["GPU"]
    assert gpu["max_workers"] * gpus == config.scaling.max_replicas * config.scaling.num_gpus
    assert gpu["resources"]["CPU"] >= gpus * config.scaling.num_cpus
    assert config.weights.ingest_num_gpus == 0, "the head has none"


def test_every_pod_has_what_the_service_needs_there(cluster, config):
    token = config.auth.token_file
    assert token is not None
    for pod in pods(cluster):
        [container] = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounted.keys() == {"/weights", "/hub", "/etc/rollout", "/dev/shm"}
        assert set(mounted.values()) == volumes.keys()
        assert volumes[mounted[str(token.parent)]]["secret"]
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert config.weights.root.is_relative_to("/weights")
        assert pod["terminationGracePeriodSeconds"] > config.scaling.drain_timeout_s
    [log, _] = [{volume["name"]: volume for volume in pod["volumes"]}["weights"] for pod in pods(cluster)]
    assert "persistentVolumeClaim" in log, "the log outlives its pod"


def test_its_ports_are_those_that_the_service_listens_on(service, cluster, config):
    head, _ = pods(cluster)
    ports = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    http = yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]
    assert (http["host"], ports["serve"], ports["uploads"]) == ("0.0.0.0", http["port"], config.weights.upload_port)


def test_its_ray_is_the_pinned_one(cluster):
    assert f"ray=={cluster['rayVersion']}\n" in (PROJECT / "requirements/gpu.txt").read_text()


def test_it_serves_as_the_shipped_deployment_for_gpus(config):
    shipped = ServiceConfig.model_validate(args_of(read_document(GPU)))
    assert (
        config.model_copy(update={"scaling": shipped.scaling, "weights": shipped.weights, "auth": shipped.auth})
        == shipped
    )
