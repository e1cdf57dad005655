"""Abbreviate thousands of module names: ``model.layers.{0-47}.mlp.experts.{0-127}.up_proj``."""

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def collapse(names: Iterable[str]) -> list[str]:
    """Join names that differ only in numbers, in order of their first appearance.

    The result is exact: only names that fill a whole range or product of ranges are joined, so it covers no other
    names. ``{1,3-5}`` stands for 1, 3, 4 and 5.
    """
    alike: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        alike.setdefault(_NUMBER.sub("{}", name), set()).add(numbers)
    return [line for kind, numbers in alike.items() for line in _summarize(kind, numbers)]


def kind(name: str) -> str:
    """Return a module's or tensor's kind, without layer and expert numbers: ``mlp.experts.*.up_proj``."""
    return _NUMBER.sub("*", re.sub(r"^model\.(layers\.\d+\.)?", "", name))


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: ``0-3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _summarize(kind: str, numbers: set[tuple[int, ...]]) -> list[str]:
    """Return one line for each set of last numbers that several first numbers share."""
    if numbers == {()}:
        return [kind]
    lasts: dict[tuple[int, ...], set[int]] = {}
    for *first, last in numbers:
        lasts.setdefault(tuple(first), set()).add(last)
    if lasts.keys() == {()}:
        return [kind.format(_in_braces(lasts[()]))]
    sharing: dict[str, set[tuple[int, ...]]] = {}
    for firsts, group in lasts.items():
        sharing.setdefault(_in_braces(group), set()).add(firsts)
    head, _, tail = kind.rpartition("{}")
    return [line + last + tail for last, firsts in sharing.items() for line in _summarize(head, firsts)]


def _in_braces(numbers: set[int]) -> str:
    return str(next(iter(numbers))) if len(numbers) == 1 else f"{{{ranges(numbers)}}}"
