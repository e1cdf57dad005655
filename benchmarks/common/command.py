"""Commands whose options are the fields of pydantic models: what belongs together is one parameter of ``main``."""

import inspect
from collections.abc import Callable, Iterator
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo


class Options(BaseModel):
    """Some options of a command. The first line of a subclass's docstring is their heading in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def run(main: Callable[..., object]) -> None:
    """``typer.run``, where parameters of ``main`` may be ``Options``: each field of theirs is an option."""
    typer.run(spread(main))


def spread(main: Callable[..., object]) -> Callable[..., object]:
    """``main`` with the fields of its ``Options`` in their place, all by name; raises ValueError for a name twice."""
    parameters = inspect.signature(main, eval_str=True).parameters
    groups = {name: p.annotation for name, p in parameters.items() if _is_group(p.annotation)}

    def command(**given: Any) -> object:
        chosen = {name: _chosen(group, given) for name, group in groups.items()}
        return main(**chosen, **given)

    options = [option for name, parameter in parameters.items() for option in _options(parameter, groups.get(name))]
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__doc__ = main.__doc__
    return command


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Options)


def _options(parameter: inspect.Parameter, group: type[Options] | None) -> Iterator[inspect.Parameter]:
    if group is None:
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    heading = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    for name, field in group.model_fields.items():
        option = typer.Option(help=field.description, rich_help_panel=heading)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=Annotated[_repeatable(field.annotation), option],
        )


def _repeatable(annotation: Any) -> Any:
    """Typer's name for ``tuple[X, ...]``, an option that may be given again and again."""
    return GenericAlias(list, get_args(annotation)[:1]) if get_origin(annotation) is tuple else annotation


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return inspect.Parameter.empty
    default = field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _chosen(group: type[Options], given: dict[str, Any]) -> Options:
    """The group's part of what was given, which loses it."""
    try:
        return group(**{name: given.pop(name) for name in group.model_fields})
    except ValidationError as error:
        said = "; ".join(f"{_named(each['loc'])}: {each['msg']}" for each in error.errors())
        raise typer.BadParameter(said) from None


def _named(location: tuple[int | str, ...]) -> str:
    return f"--{location[0]}".replace("_", "-") if location else "options"
