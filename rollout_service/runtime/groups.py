"""Division of a sequence into groups of bounded size."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def groups_of(
    items: Iterable[Item], size_of: Callable[[Item], int], max_size: int, max_items: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Yield all items in order, in groups of up to ``max_size`` in sum, or of a single larger item."""
    group: list[Item] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if group and (size + item_size > max_size or len(group) == max_items):
            yield group
            group, size = [], 0
        group.append(item)
        size += item_size
    if group:
        yield group
