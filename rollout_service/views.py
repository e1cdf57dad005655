"""Many tensors in one: torch makes each of them in a single call, where slicing and reshaping are two."""

import torch


def view_at(storage: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of ``storage`` from number ``start`` on, as a contiguous tensor of this shape; without a copy.

    ``storage``: in one dimension, contiguous, and all of what was allocated: ``start`` counts from there.
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return storage.as_strided(shape, strides[::-1], start)
