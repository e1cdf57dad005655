"""A process that knows nothing of it is sampled, and what it does most is named."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.common.stacks import Profile, profiles, sampled

CHILD = """
import threading, time
def spin():
    return sum(range(2000))
def work():
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        spin()
idle = threading.Thread(target=threading.Event().wait, name="idle", daemon=True)
idle.start()
work()
"""


def test_a_process_is_sampled_from_its_start(tmp_path: Path) -> None:
    begin = time.monotonic()
    with sampled(tmp_path):
        subprocess.run([sys.executable, "-c", CHILD], check=True)
    found = profiles(tmp_path, begin, time.monotonic())
    [busy] = [
        profile
        for (_, thread), profile in found.items()
        if thread == "MainThread" and "<string>:work" in profile.within()
    ]
    [idle] = [profile for (_, thread), profile in found.items() if thread == "idle"]
    assert busy.within()["<string>:work"] > 0.9
    assert busy.innermost()["<string>:spin"] > 0.5
    assert next(iter(idle.innermost())).endswith("threading.py:Condition.wait")
    assert profiles(tmp_path, begin - 2, begin - 1) == {}


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    with sampled(tmp_path):
        assert "stack samples" in {thread.name for thread in threading.enumerate()}
    assert "stack samples" not in {thread.name for thread in threading.enumerate()}
    assert sys.getswitchinterval() == interval
    subprocess.run([sys.executable, "-c", "import time; time.sleep(0.7)"], check=True)
    assert {file.stem for file in tmp_path.iterdir()} <= {str(os.getpid())}


def test_a_function_that_calls_itself_counts_once() -> None:
    profile = Profile({("a", "b", "a"): 3, ("a", "c"): 1})
    assert profile.within() == {"a": 1.0, "b": 0.75, "c": 0.25}
    assert profile.innermost() == {"a": 0.75, "c": 0.25}
