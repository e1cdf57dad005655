"""Reads our part of a Serve config, such as those in ``deployments/``."""

from pathlib import Path
from typing import Any

import yaml

BUILDER = "rollout_service.app:build"
"""``import_path`` by which an application in a Serve config is ours."""


def application_args(path: Path) -> dict[str, Any]:
    """The ``args`` of the one application that is ours: what ``ServiceConfig`` is made of.

    Raises ValueError saying what is wrong with the file.
    """
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
    args = ours[0].get("args", {})
    if not isinstance(args, dict):
        raise ValueError(f"{path}: `args` of the application must be a mapping of sections, not {args!r}")
    return args


def controller_options(path: Path) -> dict[str, Any] | None:
    """What the file sets for Serve's controller, to be given to ``serve.start``; None: nothing.

    Raises ValueError if ``application_args`` does.
    """
    application_args(path)
    options: dict[str, Any] | None = yaml.safe_load(path.read_text()).get("controller_options")
    return options
