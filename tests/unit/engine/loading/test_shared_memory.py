"""Memory that processes of one machine share: one writes a version into it, the others find it there."""

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore, Thread

import pytest

from rollout_service.engine.loading.shared_memory import HEADER_BYTES, Busy, Content, SharedMemory

ONE, TWO = (Content(digest=str(version), placement="whole", every=True) for version in (1, 2))


def memory(folder: Path, name: str = "log", nbytes: int = 64) -> SharedMemory:
    return SharedMemory(name, nbytes, folder=folder)


def not_needed() -> None:
    raise AssertionError("it is there already")


class TestJoining:
    def test_who_comes_later_maps_the_same_memory(self, tmp_path: Path) -> None:
        first, second = memory(tmp_path), memory(tmp_path)
        assert (first.is_new, second.is_new) == (True, False)
        first.area.fill_(7)
        assert second.area.tolist() == [7] * 64

    def test_another_name_or_size_is_other_memory(self, tmp_path: Path) -> None:
        others = memory(tmp_path), memory(tmp_path, "other"), memory(tmp_path, nbytes=128)
        assert all(each.is_new for each in others)

    def test_it_is_gone_with_its_last_user(self, tmp_path: Path) -> None:
        first = memory(tmp_path)
        first.area.fill_(7)
        second = memory(tmp_path)
        del first
        third = memory(tmp_path)
        assert not third.is_new and third.area.tolist() == [7] * 64
        del second, third
        assert memory(tmp_path).is_new

    def test_a_holder_whose_number_is_another_file_now_is_no_holder(self, tmp_path: Path) -> None:
        with (tmp_path / "file").open("w") as other:
            name = f"rollout-log-{64}"
            (tmp_path / f"{name}.holders").write_text(f"{os.getpid()} {other.fileno()}\nnonsense\n1 2 3\n0 0\n")
            assert memory(tmp_path).is_new

    def test_another_process_finds_it_and_leaves_no_lock(self, tmp_path: Path) -> None:
        mine = memory(tmp_path)
        program = f"""
            import time
            from pathlib import Path
            from rollout_service.engine.loading.shared_memory import Content, SharedMemory
            theirs = SharedMemory("log", 64, folder=Path({str(tmp_path)!r}))
            theirs.hold(Content(digest="1", placement="whole", every=True), lambda: theirs.area.fill_(1))
            print(theirs.is_new, flush=True)
            time.sleep(600)
        """
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "False\n"
            mine.hold(ONE, not_needed)  # to share it with a reader
            assert mine.area.tolist() == [1] * 64
            with pytest.raises(Busy, match="have used the shared staging area for 0 s"):
                mine.hold(TWO, not_needed, limit_s=0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        mine.hold(TWO, lambda: mine.area.fill_(2))
        assert mine.area.tolist() == [2] * 64


class TestHolding:
    def test_what_is_there_is_not_written_again(self, tmp_path: Path) -> None:
        first, second = memory(tmp_path), memory(tmp_path)
        first.hold(ONE, lambda: first.area.fill_(1))
        second.hold(ONE, not_needed)
        second.hold(ONE.model_copy(update={"every": False}), not_needed)

    @pytest.mark.parametrize(
        "wanted", [TWO, ONE.model_copy(update={"placement": "packed"}), Content(digest="1", placement="x", every=False)]
    )
    def test_other_content_waits_for_those_who_load(self, tmp_path: Path, wanted: Content) -> None:
        first, second = memory(tmp_path), memory(tmp_path)
        first.hold(ONE, lambda: first.area.fill_(1))
        with pytest.raises(Busy):
            second.hold(wanted, not_needed, limit_s=0)
        first.release()
        second.hold(wanted, lambda: second.area.fill_(2))
        assert first.area.tolist() == [2] * 64

    def test_all_chunks_are_checked_where_that_is_wanted(self, tmp_path: Path) -> None:
        first, second = memory(tmp_path), memory(tmp_path)
        first.hold(ONE.model_copy(update={"every": False}), lambda: None)
        first.release()
        checked: list[int] = []
        second.hold(ONE, lambda: checked.append(1))
        assert checked == [1]

    def test_a_failed_write_leaves_nothing_to_be_found(self, tmp_path: Path) -> None:
        first, second = memory(tmp_path), memory(tmp_path)
        first.hold(ONE, lambda: first.area.fill_(1))
        with pytest.raises(ZeroDivisionError):
            first.hold(TWO, lambda: 1 // 0)
        written: list[int] = []
        second.hold(ONE, lambda: written.append(1))
        assert written == [1]

    def test_a_torn_header_is_no_content(self, tmp_path: Path) -> None:
        first = memory(tmp_path)
        first.hold(ONE, lambda: None)
        first.release()
        first._map[:HEADER_BYTES] = first._map[:HEADER_BYTES].replace(b"digest", b"dagest")
        written: list[int] = []
        first.hold(ONE, lambda: written.append(1))
        assert written == [1]

    def test_who_waits_to_write_takes_what_another_has_written_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, *waiting = (memory(tmp_path) for _ in range(3))
        before.hold(TWO, lambda: None)
        waits, written = Semaphore(0), list[int]()

        def sleep(seconds: float) -> None:
            waits.release()
            Event().wait(seconds)

        monkeypatch.setattr("rollout_service.engine.loading.shared_memory.time.sleep", sleep)
        with ThreadPoolExecutor() as pool:
            held = [pool.submit(each.hold, ONE, lambda: written.append(1), limit_s=30) for each in waiting]
            for _ in range(10):  # both have found the other version, and wait
                waits.acquire()
            before.release()
            for each in held:
                each.result()
        assert written == [1]

    def test_of_many_at_once_one_writes_and_all_hold(self, tmp_path: Path) -> None:
        shared, written = [memory(tmp_path) for _ in range(6)], list[int]()
        threads = [Thread(target=each.hold, args=(ONE, lambda: written.append(1))) for each in shared]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert written == [1]
        for each in shared[1:]:
            each.release()
        with pytest.raises(Busy):
            shared[1].hold(TWO, not_needed, limit_s=0)
