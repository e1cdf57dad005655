"""A mapping of bounded size that drops its least recently used item."""

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def remember(held: OrderedDict[_Key, _Value], key: _Key, value: _Value, max_items: int) -> None:
    """Set an item, which is then the last used one. Drop the least recently used one if there are too many."""
    held[key] = value
    held.move_to_end(key)
    if len(held) > max_items:
        held.popitem(last=False)
