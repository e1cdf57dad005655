"""Read Serve configs with one application of this service, such as those in ``deployments/``."""

from pathlib import Path
from typing import Any

import yaml

from rollout_service.config.service import ServiceConfig

BUILDER = "rollout_service.app:build"
"""``import_path`` of this service's application in a Serve config."""
SHIPPED = Path(__file__).parents[1] / "deployments"
"""The project's ``deployments/``, which a wheel includes in the package."""
CPU, GPU = SHIPPED / "cpu_rollout.yaml", SHIPPED / "fp8_rollout.yaml"

_OF_SERVE = (
    *("proxy_location", "http_options", "grpc_options", "controller_options"),
    *("logging_config", "tracing_config"),
)
_LARGEST_PORT = 65535
Document = dict[str, Any]
"""A complete Serve config."""
Sections = dict[str, dict[str, Any]]
"""Section of ``ServiceConfig`` → field → value."""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which PyYAML silently drops the first."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        marks: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in marks:
                    problem = f"the key {key.value!r} is there twice: leave one out"
                    raise yaml.MarkedYAMLError("the first is here", marks[key.value], problem, key.start_mark)
                marks[key.value] = key.start_mark
        return node


def read_document(path: Path) -> Document:
    """Read a Serve config with one application of this service. Raises ValueError with the file's error."""
    try:
        document = yaml.load(path.read_text(), _UniqueKeys)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        raise ValueError(f"{path} is not a Serve config: it has no list `applications`")
    ours = _ours(applications)
    if len(ours) != 1:
        raise ValueError(f"{path} has {len(ours)} applications with `import_path: {BUILDER}`; it must have one")
    if misplaced := sorted(ServiceConfig.model_fields.keys() & (document.keys() | ours[0].keys())):
        raise ValueError(f"{path}: {misplaced[0]} is beside `args` or above it, where Serve ignores it: indent it")
    if not isinstance(ours[0].get("args", {}), dict):
        raise ValueError(f"{path}: `args` of the application must be a mapping of sections, not {ours[0]['args']!r}")
    _require_http_options(path, document.get("http_options"))
    read: Document = document
    return read


def args_of(document: Document) -> Sections:
    """Return the ``args`` of this service's application, from which ``ServiceConfig`` is created."""
    [ours] = _ours(document["applications"])
    args: Sections = ours.setdefault("args", {})
    return args


def _ours(applications: list[Any]) -> list[dict[str, Any]]:
    """Return the applications that are this service's."""
    return [item for item in applications if isinstance(item, dict) and item.get("import_path") == BUILDER]


def application_args(path: Path) -> Sections:
    """Return ``args_of`` a file. Raises the ValueErrors of ``read_document``."""
    return args_of(read_document(path))


def start_options(document: Document) -> Document:
    """Return a Serve config's settings for Serve as a whole, as arguments of ``serve.start``."""
    return {name: document[name] for name in _OF_SERVE if document.get(name) is not None}


def _require_http_options(path: Path, http_options: object) -> None:
    """Raise ValueError for a port that is none, or a key without a certificate, which Serve ignores (Ray 2.60.0)."""
    given = {} if http_options is None else http_options
    if not isinstance(given, dict):
        raise ValueError(f"{path}: http_options must be a mapping of settings, not {http_options!r}")
    port = str(given.get("port", 0))
    if not (port.isascii() and port.isdecimal() and int(port) <= _LARGEST_PORT):
        raise ValueError(f"{path}: http_options.port is {port}: set it to a number up to {_LARGEST_PORT}")
    names = ("ssl_certfile", "ssl_keyfile")
    missing = [name for name in names if given.get(name) is None]
    if len(missing) == 1:
        [there] = set(names) - set(missing)
        raise ValueError(f"{path}: http_options.{there} is set, but not http_options.{missing[0]}: TLS needs both")
    for name in names:
        if not isinstance(given.get(name), str | None):
            raise ValueError(f"{path}: http_options.{name} is {given[name]!r}: set it to the path of a file in PEM")
