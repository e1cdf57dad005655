"""Progress lines while a service starts."""

import threading

from rollout_service.cli.start_progress import engines_wait_for, progress_lines
from rollout_service.protocol.fleet import Fleet, ReplicaState, ReplicaStatus


def test_a_change_is_said_once_and_the_same_again_later():
    said, enough = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line.partition(": ")[2])
        if len(said) == 4:
            enough.set()

    looks = iter(["Ray Serve starts", "Ray Serve starts", "", "vLLM starts"])
    with progress_lines(lambda: next(looks, "version 0"), say, look_s=0.001, repeat_s=0.05):
        assert enough.wait(30)
    assert said[:4] == ["Ray Serve starts", "vLLM starts", "version 0", "version 0"]


def test_the_first_engine_that_does_not_serve_is_named():
    def fleet(*replicas: tuple[ReplicaState, str | None]) -> Fleet:
        statuses = tuple(
            ReplicaStatus(replica_id=str(number), version=None, state=state, error=error)
            for number, (state, error) in enumerate(replicas)
        )
        return Fleet(latest_version=3, paused=False, replicas=statuses)

    assert engines_wait_for(fleet()) == "the engine's process starts"
    assert engines_wait_for(fleet(("ready", None))) == ""
    assert engines_wait_for(fleet(("ready", None), ("syncing", None))) == "the engine loads version 3 (1 of 2 engines)"
    assert engines_wait_for(fleet(("starting", None))).startswith("vLLM starts; ")
    assert engines_wait_for(fleet(("starting", "GPU 1 is taken"))) == "GPU 1 is taken"
