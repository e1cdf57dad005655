"""The shadow's follower hears of new versions, and of nothing else."""

import asyncio
from pathlib import Path

from rollout_service.protocol.weight_log import Control
from rollout_service.shadow.watch import LogWatch
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import replica
from tests.unit.store.versions import commit

STATUS = replica("shadow", None)


async def test_a_new_version_answers_the_poll(tmp_path: Path) -> None:
    log = WeightLog(tmp_path)
    watch = LogWatch(log, poll_s=30.0)
    empty = await watch.sync(STATUS, None)
    polling = asyncio.create_task(watch.sync(STATUS, empty))
    await asyncio.sleep(0)
    commit(log, 4)
    assert (await polling).version == 4


async def test_without_one_the_poll_answers_after_its_time(tmp_path: Path) -> None:
    watch = LogWatch(WeightLog(tmp_path), poll_s=0.0)
    seen = await watch.sync(STATUS, None)
    assert await watch.sync(STATUS, seen) == seen


async def test_a_pause_is_not_meant_for_it(tmp_path: Path) -> None:
    log = WeightLog(tmp_path)
    commit(log, 1)
    log.set_control(Control(paused=True))
    assert not (await LogWatch(log, poll_s=0.0).sync(STATUS, None)).paused
