"""Measures the package's tree: sizes, ``Any`` in signatures, modules with one importer, the largest classes.

    python scripts/house.py [FOLDER]

Prints, asserts nothing. ``Any``: functions one of whose parameters or whose result is annotated with it.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def percentiles(values: list[int]) -> str:
    """Median, 90th percentile and largest."""
    ordered = sorted(values) or [0]
    return " / ".join(str(ordered[min(int(len(ordered) * q), len(ordered) - 1)]) for q in (0.5, 0.9, 1.0))


def functions(tree: ast.AST) -> Iterator[Function]:
    """Of a module, methods and inner ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def has_any(function: Function) -> bool:
    """Whether ``Any`` stands in its signature."""
    arguments = function.args
    annotated = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [argument.annotation for argument in annotated if argument is not None] + [function.returns]
    names = (node for annotation in annotations if annotation is not None for node in ast.walk(annotation))
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in names)


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of the package that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {module for a in node.names if (module := f"{node.module}.{a.name}") in modules} or {node.module}
    return found & modules


def attributes(cls: ast.ClassDef) -> set[str]:
    """What its methods assign to ``self``."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def main(package: Path) -> None:
    """Print the tables."""
    files = sorted(package.rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    lines = [len(file.read_text().splitlines()) for file in files]
    every = [function for tree in trees.values() for function in functions(tree)]
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in every]
    with_any = sum(map(has_any, every))
    names = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files}
    names = {file: name.removesuffix(".__init__") for file, name in names.items()}
    importers = Counter(m for file in files for m in imported_modules(trees[file], set(names.values())) - {names[file]})
    print(f"files / lines                    {len(files)} / {sum(lines)}")
    print(f"file p50 / p90 / max             {percentiles(lines)}")
    print(f"function p50 / p90 / max         {percentiles(lengths)}")
    print(f"signatures with Any              {with_any} of {len(every)} ({with_any / len(every):.1%})")
    print(f"modules with one importer        {sum(count == 1 for count in importers.values())}")
    classes = [
        (names[file], node) for file, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    sizes = [(sum(isinstance(n, Function) for n in c.body), len(attributes(c)), f"{m}.{c.name}") for m, c in classes]
    print("\nlargest classes                  methods  attributes")
    for methods, fields, name in sorted(sizes, reverse=True)[:8]:
        print(f"  {name.removeprefix(package.name + '.'):60} {methods:3} {fields:3}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "rollout_service"))
