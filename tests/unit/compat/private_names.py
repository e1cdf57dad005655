"""Compare an undocumented name of a library with what it was when the package was written."""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

_LINE = re.compile(r"([\w.]+)(?:\(([\w ]*)\))?(?:: ([\w ]+))?")


@dataclass(frozen=True)
class PrivateName:
    """A name in ``module``; ``name`` may have dots, for members of a class."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    """Parameters of a function or a constructor, in order; None: not checked."""
    assigns: tuple[str, ...] = ()
    """Attributes that its code assigns to objects: a class to its instances, a function to its arguments. They are
    checked in the source, since there is no object yet."""
    only_source: bool = False
    """Check ``assigns`` in the module's file without importing it: it is large, and not every process needs it."""


def names_in(text: str) -> list[PrivateName]:
    """Parse a table of names, see names.txt."""
    found, module, file = list[PrivateName](), "", ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            module, _, file = line.strip("[]").partition(" ")
        elif not line.startswith("#"):
            name, parameters, assigns = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            taken = None if parameters is None else tuple(parameters.split())
            found.append(PrivateName(module, name, taken, tuple((assigns or "").split()), bool(file)))
    return found


def problem(name: PrivateName) -> str | None:
    """Return how the installed library differs from ``name``; None: it does not."""
    try:
        found: Any = _nodes_in_file(name) if name.only_source else attrgetter(name.name)(import_module(name.module))
    except (ImportError, AttributeError) as error:
        return f"is not there: {error}"
    if name.parameters is not None:
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != name.parameters:
            return f"takes ({', '.join(parameters)}) now, not ({', '.join(name.parameters)})"
    assigned = _assigned_by(found) if name.only_source else _assigned(found)
    gone = sorted({*name.assigns} - {*assigned}) if name.assigns else []
    return f"gives its objects no {', '.join(gone)} any more" if gone else None


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
