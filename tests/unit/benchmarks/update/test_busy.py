"""The load that updates are measured under."""

import asyncio

from benchmarks.update.busy import busy


async def test_so_many_requests_are_under_way_and_none_is_left() -> None:
    under_way: list[int] = []
    seen: set[tuple[int, ...]] = set()
    made = 0

    async def request(number: int) -> None:
        nonlocal made
        under_way.append(number)
        await asyncio.sleep(0)
        seen.add(tuple(sorted(under_way)))
        under_way.remove(number)
        made += 1

    async with busy(3, request):
        while made < 10:
            await asyncio.sleep(0)
    assert (0, 1, 2) in seen and under_way == []
