"""Tensors seen otherwise, without a copy."""

import functools

import torch

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bits of elements, by their bytes; a GPU computes with few unsigned integers."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes (row-major) as uint8 [N] on its device; no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def view_at(storage: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of ``storage`` from number ``start`` on, as a contiguous tensor of this shape.

    One call of torch, where slicing and reshaping are two.

    ``storage``: in one dimension, contiguous, and all of what was allocated: ``start`` counts from there.
    """
    return storage.as_strided(shape, _strides(shape), start)


@functools.lru_cache(1024)  # of thousands of tensors few shapes differ
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(strides[::-1])
