"""An engine core that hangs is told from one that is slow."""

import asyncio

from rollout_service.engine.adapter import CoreWatch
from tests.support.clock import Clock


class Core:
    """Answers when a test lets it."""

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[bool]] = []

    async def is_paused(self) -> bool:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]


async def test_the_silence_of_a_core_is_counted_until_it_answers():
    core, clock = Core(), Clock()
    watch = CoreWatch(core.is_paused, clock.monotonic)
    assert watch.silent_s(excused=False) == 0
    await asyncio.sleep(0)  # the core is asked
    clock.go_on(400)
    assert watch.silent_s(excused=False) == 400
    clock.go_on(1000)
    assert watch.silent_s(excused=True) == 0
    clock.go_on(30)
    assert watch.silent_s(excused=False) == 30
    assert len(core.questions) == 1
    core.questions[0].set_exception(RuntimeError("the core refuses to answer"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert watch.silent_s(excused=False) == 0
    await asyncio.sleep(0)
    assert len(core.questions) == 2
