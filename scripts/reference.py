"""Generate the reference pages of docs/ from the code: settings, HTTP routes, errors and metrics.

python -m scripts.reference            name the pages that differ from the code, and exit with 1 if any does
python -m scripts.reference --write    write the pages
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from benchmarks.common.marked import markdown_table, with_part
from benchmarks.common.paths import PROJECT
from rollout_service.config import ServiceConfig
from rollout_service.errors import RolloutServiceError, error_classes
from rollout_service.gateway.completions import CompletionRequest
from rollout_service.gateway.deployment import SURFACES
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.metrics.table import METRICS
from rollout_service.protocol.generate import GenerateRequest, RolloutOptions
from rollout_service.protocol.sampling import CommonSampling, Sampling

DOCS = PROJECT / "docs"
MAKER = "python -m scripts.reference"
TITLES = {
    "generate": "Rollouts",
    "score": "Rollouts",
    "completions": "Rollouts",
    "openai.routes": "Chats and sessions",
    "openai.sessions": "Chats and sessions",
    "models": "Models and health",
    "weights": "Weights",
    "adapters": "Adapters",
    "update_weights": "vLLM's and prime-rl's updates",
    "vllm_weights": "vLLM's and prime-rl's updates",
    "mismatch": "Mismatch",
    "control": "Replicas",
    "metrics": "Metrics",
    "sglang.routers": "SGLang's routes",
    "areal": "AReaL's routes",
    "tinker": "Tinker's sampling routes",
}
"""The heading above the routes of each module."""
MAX_FIELDS = 8
"""Bodies with more fields have a table of their own, or another server defines them."""
Row = tuple[str, ...]


def in_a_cell(text: str) -> str:
    """Return a docstring as Markdown for a table's cell."""
    line = " ".join(text.split()).replace("``", "`").replace("|", "&#124;").replace("None:", "null:")
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", line)


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring as Markdown for a table's cell."""
    line = in_a_cell(text or "")
    sentence = re.match(r".+?\.(?=\s|$)", line)
    return sentence[0] if sentence else line


@cache
def _classes(module: ModuleType) -> Mapping[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field that ``model`` itself declares; empty for a field without one."""
    body = _classes(sys.modules[model.__module__])[model.__name__].body
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        found[node.target.id] = str(following.value.value) if is_documented else ""  # type: ignore[union-attr]
    return {name: text for name, text in found.items() if name in model.model_fields}


def default_of(model: type[BaseModel], name: str) -> str:
    """Return the default of a field, and its other values if it has a list of them; empty for a required field."""
    field = model.model_fields[name]
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    others = [f"`{other}`" for other in _choices(field.annotation) if other != value]
    default = f"`{value}`" if isinstance(value, str | PurePath) else f"`{json.dumps(value)}`"
    return f"{default}; {' '.join(others)}" if others else default


def _choices(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def fields_table(*models: type[BaseModel]) -> str:
    """Return the table of a request's fields."""
    rows = [
        (f"`{name}`", default_of(model, name), first_sentence(text))
        for model in models
        for name, text in field_docs(model).items()
    ]
    return markdown_table(("field", "default", "meaning"), rows)


def setting_rows(prefix: str, section: type[BaseModel]) -> Iterator[Row]:
    """Yield a row for each setting of a section and of the sections inside it."""
    for name, text in field_docs(section).items():
        inner = section.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_rows(f"{prefix}.{name}", inner)
        else:
            yield f"`{prefix}.{name}`", default_of(section, name), first_sentence(text)


def settings() -> str:
    """Return a heading and a table for each section of a configuration."""
    parts = []
    for name, field in ServiceConfig.model_fields.items():
        section: Any = field.annotation
        rows = list(setting_rows(name, section))
        table = markdown_table(("setting", "default; other values", "meaning"), rows)
        parts.append(f"## {name}\n{in_a_cell(section.__doc__)}\n\n{table}")
    return "\n".join(parts)


def routes() -> str:
    """Return a heading and a table for each group of routes."""
    groups: dict[str, list[Any]] = {}
    for module in SURFACES:
        title = TITLES[module.__name__.split(".", 2)[2]]
        for route in module.router.routes:
            guarded = ", guarded" if isinstance(route, GuardedRoute) else ""
            groups.setdefault(f"## {title}{guarded}\n", []).append(route)
    heading = ("route", "input", "what it does")
    return "\n".join(title + markdown_table(heading, route_rows(group)) for title, group in groups.items())


def route_rows(group: Iterable[Any]) -> list[Row]:
    """Return a row for each operation but those that only refuse. Routes that do the same share a row."""
    paths: dict[str, dict[str, Any]] = FastAPI(routes=[*group]).openapi()["paths"]
    names: dict[Row, list[str]] = {}
    for route in group:
        for method in sorted(route.methods):
            operation = paths[route.path_format][method.lower()]
            described = _inputs(route, operation), first_sentence(operation.get("description"))
            if not described[1].startswith("Refuse "):
                names.setdefault(described, []).append(f"`{method} {route.path_format}`")
    return [("<br>".join(routes), *described) for described, routes in names.items()]


def _inputs(route: Any, operation: Mapping[str, Any]) -> str:
    """Return the names of a route's query parameters and of its body's fields."""
    names = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
    annotation = route.body_field.field_info.annotation if route.body_field is not None else None
    if annotation in (GenerateRequest, CompletionRequest):
        return "[fields](#fields-of-a-rollout)"
    for model in (annotation, *get_args(annotation)):
        if isinstance(model, type) and issubclass(model, BaseModel) and len(model.model_fields) <= MAX_FIELDS:
            names += model.model_fields
    return " ".join(f"`{name}`" for name in dict.fromkeys(names))


def errors() -> str:
    """Return the table of errors."""
    classes = sorted(error_classes().values(), key=lambda cls: (cls.http_status, cls.__name__))
    rows = [
        (f"`{cls.__name__}`", str(cls.http_status), first_sentence(cls.__doc__))
        for cls in classes
        if cls is not RolloutServiceError
    ]
    return markdown_table(("type", "status", "meaning"), rows)


def metrics(source: str) -> Callable[[], str]:
    """Return the function that makes the table of one source's metrics."""

    def made() -> str:
        rows = [
            (
                f"`{metric.name}`",
                " ".join(f"`{label}`" for label in metric.labels),
                f"{'Histogram. ' if metric.kind == 'histogram' else ''}{in_a_cell(metric.description)}",
            )
            for metric in METRICS
            if metric.source == source
        ]
        return markdown_table(("name", "labels", "meaning"), rows)

    return made


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "settings.md": {"settings": settings},
    "http.md": {
        "routes": routes,
        "RolloutOptions": lambda: fields_table(RolloutOptions),
        "GenerateRequest": lambda: fields_table(GenerateRequest),
        "CompletionRequest": lambda: fields_table(CompletionRequest),
        "Sampling": lambda: fields_table(CommonSampling, Sampling),
        "errors": errors,
    },
    "metrics.md": {source: metrics(source) for source in ("process", "service", "vllm", "serve")},
}
"""Page → the part of it between two marks → the function that makes the part."""


def rewritten(name: str, text: str) -> str:
    """Return the text of a page with its generated parts. Raises ValueError for a missing mark."""
    for part, make in PAGES[name].items():
        text = with_part(text, f"{MAKER}: {part}", make())
    return text


def main(write: Annotated[bool, typer.Option("--write", help="Write the pages.")] = False) -> None:
    """Check that the reference pages are what the code says, or write them."""
    outdated = False
    for name in PAGES:
        page: Path = DOCS / name
        text = page.read_text()
        new = rewritten(name, text)
        if new == text:
            continue
        if write:
            page.write_text(new)
        else:
            outdated = True
            typer.echo(f"docs/{name}: differs from the code; run {MAKER} --write", err=True)
    raise typer.Exit(1 if outdated else 0)


if __name__ == "__main__":
    typer.run(main)
