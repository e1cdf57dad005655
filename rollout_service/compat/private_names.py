"""Check that undocumented names of a library exist, and are what they were when this package was written.

``vllm_internals.py`` and ``transformers_internals.py`` list such names and check them when they are imported. An
upgrade that removes one therefore fails the service's start, with the name, instead of half of it running.
"""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any


class PrivateNameMissing(ImportError):
    """A library no longer has a name, or has another object under it; lists these, and where they were read."""


@dataclass(frozen=True)
class PrivateName:
    """A name in ``module``; ``name`` may have dots, for members of a class."""

    module: str
    name: str
    read_in: str
    """Version of the library whose source was read."""
    parameters: tuple[str, ...] | None = None
    """Parameters of a function or a constructor, in order; None: not checked."""
    assigns: tuple[str, ...] = ()
    """Attributes that its code assigns to objects: a class to its instances, a function to its arguments. They are
    checked in the source, since there is no object yet."""
    only_source: bool = False
    """Check ``assigns`` in the module's file without importing it: it is large, and not every process needs it."""


def private_name(
    module: str, name: str, *, read_in: str, takes: str | None = None, gives: str = "", only_source: bool = False
) -> PrivateName:
    """Return a name. ``takes``: its parameters; ``gives``: attributes that it assigns; both separated by spaces."""
    parameters = None if takes is None else tuple(takes.split())
    return PrivateName(module, name, read_in, parameters, tuple(gives.split()), only_source)


Import = Callable[[str], object]


def require_names(distributions: tuple[str, ...], names: Iterable[PrivateName], load: Import | None = None) -> None:
    """Raise PrivateNameMissing, with every name of ``names`` that differs from its description.

    Args:
        distributions: names of the library's packages, for the message.
        load: returns the module of a name. None: it is imported.
    """
    wrong = [problem for name in names if (problem := _problem(name, load or importlib.import_module)) is not None]
    if wrong:
        raise PrivateNameMissing(
            f"{_installed(distributions)} is not what this release of rollout-service was written against: "
            f"{'; '.join(wrong)}. Install the version that requirements/ names"
        )


def _problem(name: PrivateName, load: Import) -> str | None:
    what = f"{name.module}.{name.name} (read in {name.read_in})"
    try:
        found: Any = _nodes_in_file(name) if name.only_source else attrgetter(name.name)(load(name.module))
    except (ImportError, AttributeError) as error:
        return f"{what} is not there: {error}"
    if name.parameters is not None:
        try:
            parameters = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return f"{what} is no function any more, but {type(found).__name__}"
        if parameters != name.parameters:
            return f"{what} takes ({', '.join(parameters)}) now, not ({', '.join(name.parameters)})"
    assigned = _assigned_by(found) if name.only_source else _assigned(found)
    gone = sorted({*name.assigns} - {*assigned}) if name.assigns else []
    return f"{what} gives its objects no {', '.join(gone)} any more" if gone else None


def _nodes_in_file(name: PrivateName) -> list[ast.AST]:
    spec = importlib.util.find_spec(name.module)
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {name.module!r}")
    if (nodes := _definitions(Path(spec.origin)).get(name.name)) is None:
        raise AttributeError(f"{spec.origin} does not define {name.name}")
    return nodes


def _assigned(found: type | FunctionType) -> Iterator[str]:
    """Yield the attributes that the code of a function, or of a class and its bases, assigns."""
    for part in found.__mro__ if isinstance(found, type) else (found,):
        try:
            nodes = _definitions(Path(inspect.getfile(part)))[part.__qualname__]
        except (KeyError, OSError, TypeError):  # built in, or without source
            continue
        yield from _assigned_by(nodes)


def _assigned_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # a field
            yield node.target.id
        elif isinstance(node, ast.FunctionDef) and _is_property(node):
            yield node.name
        elif isinstance(node, ast.Call) and (buffer := _registered_buffer(node)) is not None:
            yield buffer


def _registered_buffer(call: ast.Call) -> str | None:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "register_buffer":
        return None
    name = call.args[0]
    return str(name.value) if isinstance(name, ast.Constant) else None


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


@cache
def _definitions(file: Path) -> dict[str, list[ast.AST]]:
    """Return the nodes of each class and function at a file's top level."""
    tree = ast.parse(file.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: list(ast.walk(node)) for node in tree.body if isinstance(node, kinds)}


def _installed(distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return distributions[0]
