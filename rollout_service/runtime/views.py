"""Other views of tensors, without a copy."""

import functools

import torch

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Signed integer dtype for each element size in bytes; GPUs support few unsigned integers."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes (row-major) as uint8 [N] on its device; no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def view_at(storage: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """View the elements of ``storage`` from index ``start`` on as a contiguous tensor of this shape.

    Takes one torch call, while slicing and reshaping are two. ``storage``: one-dimensional, contiguous, and the whole
    allocation: ``start`` counts from its beginning.
    """
    return storage.as_strided(shape, _strides(shape), start)


@functools.lru_cache(1024)  # thousands of tensors have few different shapes
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(strides[::-1])
