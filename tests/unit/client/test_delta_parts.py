"""The parts of a delta are those of its stream, and what takes the service longest is sent first."""

import itertools
import random

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.client._delta_parts import largest_first
from rollout_service.protocol.upload import num_parts, part_size
from tests.unit.client.service import Service


@pytest.mark.parametrize("part_bytes", [1, 7, 100, 10_000])
def test_parts_are_those_of_the_stream(part_bytes: int) -> None:
    chosen = random.Random(0)
    told = [(chosen.randbytes(chosen.randint(1, 60)), chosen.choice([10, 1000, 3000])) for _ in range(50)]
    stream = b"".join(encoded for encoded, _ in told)
    parts = list(largest_first(told, part_bytes))
    assert sorted(part.index for part in parts) == list(range(num_parts(len(stream), part_bytes)))
    for part in parts:
        assert part.nbytes == part_size(part.index, len(stream), part_bytes)
        assert bytes(part.data) == stream[part.index * part_bytes :][:part_bytes]


def test_those_of_the_largest_tensors_come_first_and_others_in_their_order() -> None:
    embedding, layer, head = (b"e" * 10, 900), (b"l" * 5, 20), (b"h" * 12, 900)
    told = [embedding, *itertools.repeat(layer, 4), head]
    assert [part.index for part in largest_first(told, 5)] == [0, 1, 6, 7, 8, 2, 3, 4, 5]
    # the last part of the layers begins the head's
    assert [part.index for part in largest_first(told, 4)] == [0, 1, 2, 7, 8, 9, 10, 3, 4, 5, 6]


def test_without_changes_there_is_no_part() -> None:
    assert list(largest_first([], 100)) == []


async def test_a_push_sends_them_so(service: Service) -> None:
    service.part_bytes = 64
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(size, 64, generator=generator).bfloat16()
        for name, size in (("norm", 2), ("layer", 32), ("head", 64))
    }
    async with RolloutClient(service.url) as client:
        await client.push_weights(1, weights, transport="delta", wait="none")
        for tensor in weights.values():
            tensor.view(torch.int16).view(-1)[::20] ^= 1
        sent = len(service.parts_sent())
        await client.push_weights(2, weights, transport="delta", wait="none", parallel_parts=1)
    delta = service.uploads[2].begin
    assert delta.delta is not None
    *_, head = (tensor.nbytes for tensor in delta.stream)
    first = (delta.nbytes - head) // 64
    order = service.parts_sent()[sent:]
    assert order == [*range(first, num_parts(delta.nbytes, 64)), *range(first)] and first > 0
