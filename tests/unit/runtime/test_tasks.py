"""Work that outlives its callers, and waiting for what others change."""

import asyncio
import gc

import pytest

from rollout_service.errors import NotReady
from rollout_service.runtime.tasks import ChangeNotifier, ClosableLock, RepeatedTask, ShieldedTasks, start_watch

LONG_S = 30.0
LONGER_S = 2 * LONG_S
"""Waiting that ends by itself comes too late for a test."""


class TestWatches:
    async def test_an_error_that_ends_a_watch_is_logged(self, caplog):
        async def fail() -> None:
            raise KeyError("ours")

        repeated = RepeatedTask("expiring uploads", fail, LONG_S)
        repeated.begin()
        watch = start_watch("counting reads", fail())
        await asyncio.wait([watch, repeated._task])
        await asyncio.sleep(0)
        assert [each.message.partition(" has failed")[0] for each in caplog.records] == [
            "expiring uploads",
            "counting reads",
        ]
        assert all(each.exc_info[0] is KeyError for each in caplog.records)

    async def test_a_cancelled_watch_is_not_logged(self, caplog):
        watch = start_watch("counting reads", asyncio.Event().wait())
        watch.cancel()
        await asyncio.wait([watch])
        await asyncio.sleep(0)
        assert not caplog.records


class TestShieldedTasks:
    @pytest.mark.parametrize(("error", "has_trace"), [(NotReady("ending"), False), (KeyError("ours"), True)], ids=repr)
    async def test_a_failure_whose_caller_has_left_is_logged_once(self, caplog, error, has_trace):
        go_on, shielded = asyncio.Event(), ShieldedTasks()

        async def fail() -> None:
            await go_on.wait()
            raise error

        caller = asyncio.create_task(shielded.run(fail()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        go_on.set()
        while shielded._tasks:
            await asyncio.sleep(0)
        gc.collect()
        [record] = caplog.records
        assert record.message == f"a call whose caller has left has failed: {error}"
        assert (record.exc_info is not None) == has_trace

    async def test_whoever_stays_gets_the_result_or_the_error(self):
        async def answer(error: Exception | None) -> int:
            if error is not None:
                raise error
            return 42

        shielded = ShieldedTasks()
        assert await shielded.run(answer(None)) == 42
        with pytest.raises(KeyError, match="ours"):
            await shielded.run(answer(KeyError("ours")))

    async def test_work_goes_on_when_whoever_waits_for_it_goes_away(self):
        going, done = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await going.wait()
            done.set()

        shielded = ShieldedTasks()
        caller = asyncio.create_task(shielded.run(work()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not done.is_set()
        going.set()
        await asyncio.wait_for(done.wait(), LONG_S)

    async def test_work_that_has_ended_is_let_go(self):
        shielded = ShieldedTasks()
        await shielded.run(asyncio.sleep(0))
        await asyncio.sleep(0)
        assert not shielded._tasks


class TestChanges:
    async def test_what_is_so_already_is_not_waited_for(self):
        assert await asyncio.wait_for(ChangeNotifier().wait(lambda: True, timeout_s=0), LONG_S)

    async def test_all_who_wait_are_told_once_it_is_so_and_not_before(self):
        changes, state = ChangeNotifier(), {"version": 0}
        waiting = [asyncio.create_task(changes.wait(lambda: state["version"] >= 2, LONGER_S)) for _ in range(3)]
        for version in (0, 1):
            state["version"] = version
            await changes.notify()
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
        state["version"] = 2
        await changes.notify()
        assert await asyncio.wait_for(asyncio.gather(*waiting), LONG_S) == [True, True, True]

    async def test_waiting_in_vain_ends_with_false(self):
        assert not await ChangeNotifier().wait(lambda: False, timeout_s=0.01)

    async def test_an_unannounced_change_is_seen_at_the_timeout(self):
        asked: list[None] = []

        def reached() -> bool:
            asked.append(None)
            return len(asked) == 2

        assert await ChangeNotifier().wait(reached, timeout_s=0.01) and len(asked) == 2

    async def test_an_error_in_a_condition_reaches_only_its_own_waiter(self):
        def broken() -> bool:
            raise ValueError("damaged")

        changes = ChangeNotifier()
        with pytest.raises(ValueError, match="damaged"):
            await changes.wait(broken, LONG_S)
        assert await asyncio.wait_for(changes.wait(lambda: True, LONG_S), LONG_S)

    async def test_one_who_stops_waiting_does_not_disturb_the_others(self):
        changes, state = ChangeNotifier(), {"reached": False}
        leaves, stays = (asyncio.create_task(changes.wait(lambda: state["reached"], LONGER_S)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        state["reached"] = True
        await changes.notify()
        assert await asyncio.wait_for(stays, LONG_S)

    async def test_waiters_are_told_to_retry_when_changes_end(self):
        changes = ChangeNotifier()
        waiting = asyncio.create_task(changes.wait(lambda: False, LONGER_S))
        await asyncio.sleep(0)
        await changes.end()
        with pytest.raises(NotReady, match="another one takes its place"):
            await asyncio.wait_for(waiting, LONG_S)
        with pytest.raises(NotReady):
            await changes.wait(lambda: False, LONGER_S)
        assert await changes.wait(lambda: True, LONGER_S)


class TestTurns:
    async def test_a_closed_lock_lets_its_holder_finish_and_refuses_others(self):
        turns, going, done = ClosableLock(), asyncio.Event(), []

        async def work(name: str) -> None:
            async with turns:
                await going.wait()
                done.append(name)

        has_it, waits = (asyncio.create_task(work(name)) for name in ("has it", "waits"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(turns.close())
        await asyncio.sleep(0)
        late = asyncio.create_task(work("late"))
        await asyncio.sleep(0)
        assert not closing.done()
        going.set()
        await asyncio.wait_for(asyncio.gather(has_it, closing), LONG_S)
        for refused in (waits, late):
            with pytest.raises(NotReady, match="send it again"):
                await asyncio.wait_for(refused, LONG_S)
        assert done == ["has it"]
