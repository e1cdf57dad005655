"""The KubeRay manifest: fields of the resources' own schemas, and what is said in several places is the same.

No cluster runs here. RayCluster's fields are read by Ray itself, whose autoscaler takes the same resource (Ray 2.60.0,
``ray/autoscaler/_private/kuberay/autoscaling_config.py``). The names of the rest are those of KubeRay's API
``ray.io/v1`` (``RayServiceSpec``, ``RayClusterSpec``, ``HeadGroupSpec``, ``WorkerGroupSpec``, ``AutoscalerOptions``)
and of Kubernetes' ``core/v1`` (``PodTemplateSpec`` and what is in it); SCHEMA has those that the manifest uses.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import GPU, args_of, read_document

PROJECT = Path(__file__).parents[2]
MANIFEST = PROJECT / "deployments/kubernetes/rayservice.yaml"


def record(required: str = "", optional: str = "", **fields: object) -> dict[str, object]:
    """A mapping with these fields and no others; those without a schema of their own are text."""
    names = [*required.split(), *optional.split()]
    return {
        "type": "object",
        "required": required.split(),
        "properties": {name: fields.get(name, {"type": "string"}) for name in names},
        "additionalProperties": False,
    }


def several(item: object) -> dict[str, object]:
    return {"type": "array", "items": item, "minItems": 1}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
CONTAINER = record(
    "name image resources volumeMounts",
    "ports env",
    resources=record("requests limits", requests=TEXTS, limits=TEXTS),
    ports=several(record("name containerPort", containerPort=PORT)),
    env=several(record("name value")),
    volumeMounts=several(record("name mountPath", "readOnly", readOnly={"type": "boolean"})),
)
VOLUME = record(
    "name",
    "emptyDir secret persistentVolumeClaim",
    emptyDir=record("", "medium sizeLimit"),
    secret=record("secretName"),
    persistentVolumeClaim=record("claimName"),
)
TEMPLATE = record(
    "spec",
    spec=record(
        "containers volumes",
        "terminationGracePeriodSeconds securityContext",
        terminationGracePeriodSeconds=NUMBER,
        securityContext=record("fsGroup", fsGroup=NUMBER),
        containers=several(CONTAINER),
        volumes=several(VOLUME),
    ),
)
SCHEMA = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=record("name"),
    spec=record(
        "serveConfigV2 rayClusterConfig",
        "upgradeStrategy",
        upgradeStrategy=record("type", type={"enum": ["None", "NewCluster"]}),
        rayClusterConfig=record(
            "rayVersion headGroupSpec workerGroupSpecs",
            "enableInTreeAutoscaling autoscalerOptions",
            enableInTreeAutoscaling={"type": "boolean"},
            autoscalerOptions=record("", "idleTimeoutSeconds", idleTimeoutSeconds=NUMBER),
            headGroupSpec=record("rayStartParams template", rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs=several(
                record(
                    "groupName replicas minReplicas maxReplicas rayStartParams template",
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER),
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)


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


def test_its_fields_are_those_of_the_resource(service: dict[str, Any]) -> None:
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(service)] == []


def test_a_misspelt_field_would_be_found(service: dict[str, Any]) -> None:
    wrong = yaml.safe_load(yaml.safe_dump(service).replace("mountPath", "mountpath"))
    assert any("mountpath" in error.message for error in Draft202012Validator(SCHEMA).iter_errors(wrong))


def test_ray_s_autoscaler_reads_the_cluster(service: dict[str, Any], config: ServiceConfig) -> None:
    resource = {"metadata": {"name": "rollout", "namespace": "default"}, "spec": service["spec"]["rayClusterConfig"]}
    read = _derive_autoscaling_config_from_ray_cr(resource)
    head, gpu = read["available_node_types"]["headgroup"], read["available_node_types"]["gpu"]
    assert head["resources"]["CPU"] == 0 and "GPU" not in head["resources"]
    gpus = gpu["resources"]["GPU"]
    assert gpu["max_workers"] * gpus == config.scaling.max_replicas * config.scaling.num_gpus
    assert gpu["resources"]["CPU"] >= gpus * config.scaling.num_cpus
    assert config.weights.ingest_num_gpus == 0, "the head has none"


def test_every_pod_has_what_the_service_needs_there(cluster: dict[str, Any], config: ServiceConfig) -> None:
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


def test_its_ports_are_those_that_the_service_listens_on(
    service: dict[str, Any], cluster: dict[str, Any], config: ServiceConfig
) -> None:
    head, _ = pods(cluster)
    ports = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    http = yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]
    assert (http["host"], ports["serve"], ports["uploads"]) == ("0.0.0.0", http["port"], config.weights.upload_port)


def test_its_ray_is_the_pinned_one(cluster: dict[str, Any]) -> None:
    assert f"ray=={cluster['rayVersion']}\n" in (PROJECT / "requirements/gpu.txt").read_text()


def test_it_serves_as_the_shipped_deployment_for_gpus(config: ServiceConfig) -> None:
    shipped = ServiceConfig.model_validate(args_of(read_document(GPU)))
    assert (
        config.model_copy(update={"scaling": shipped.scaling, "weights": shipped.weights, "auth": shipped.auth})
        == shipped
    )
