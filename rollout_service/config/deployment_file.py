"""Reads and writes Serve configs of which one application is ours, such as those in ``deployments/``."""

from pathlib import Path
from typing import Any

import yaml

BUILDER = "rollout_service.app:build"
"""``import_path`` by which an application in a Serve config is ours."""
SHIPPED = Path(__file__).parents[1] / "deployments"
"""The project's ``deployments/``, which a wheel brings inside the package."""
CPU, GPU = SHIPPED / "cpu_rollout.yaml", SHIPPED / "fp8_rollout.yaml"

Document = dict[str, Any]
"""A whole Serve config."""
Sections = dict[str, dict[str, Any]]
"""Section of ``ServiceConfig`` → field → value."""


def read_document(path: Path) -> Document:
    """A Serve config with one application that is ours. Raises ValueError saying what is wrong with the file."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        raise ValueError(f"{path} is not a Serve config: it has no list `applications`")
    ours = [item for item in applications if isinstance(item, dict) and item.get("import_path") == BUILDER]
    if len(ours) != 1:
        raise ValueError(f"{path} has {len(ours)} applications with `import_path: {BUILDER}`; it must have one")
    if not isinstance(ours[0].get("args", {}), dict):
        raise ValueError(f"{path}: `args` of the application must be a mapping of sections, not {ours[0]['args']!r}")
    read: Document = document
    return read


def args_of(document: Document) -> Sections:
    """The ``args`` of the one application that is ours: what ``ServiceConfig`` is made of."""
    [ours] = [item for item in document["applications"] if item.get("import_path") == BUILDER]
    args: Sections = ours.setdefault("args", {})
    return args


def application_args(path: Path) -> Sections:
    """``args_of`` a file. Raises ValueError as ``read_document``."""
    return args_of(read_document(path))


def controller_options(path: Path) -> dict[str, object] | None:
    """What the file sets for Serve's controller, to be given to ``serve.start``; None: nothing.

    Raises ValueError as ``read_document``.
    """
    options: dict[str, object] | None = read_document(path).get("controller_options")
    return options
