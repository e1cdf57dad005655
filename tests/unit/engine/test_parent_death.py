"""How an engine's processes end."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from rollout_service.engine.parent_death import skip_finalization

CONTEXT = multiprocessing.get_context("spawn")  # as vLLM starts its processes


class Finalized:
    """Writes when Python destroys it: at the latest when the interpreter is finalized."""

    def __init__(self, file: int) -> None:
        self._file, self._write = file, os.write

    def __del__(self) -> None:
        self._write(self._file, b"finalized")


KEPT: list[Finalized] = []
"""Lives as long as the interpreter."""


def work(connection: Connection, skips: bool) -> None:
    if skips:
        assert skip_finalization()
    KEPT.append(Finalized(os.dup(connection.fileno())))
    os.write(connection.fileno(), b"worked ")


@pytest.mark.parametrize(("skips", "said"), [(False, b"worked finalized"), (True, b"worked ")])
def test_an_engine_process_ends_without_finalization(skips, said):
    read, write = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(write, skips))
    process.start()
    write.close()
    process.join()
    assert os.read(read.fileno(), 100) == said


def test_the_replica_itself_is_finalized():
    assert not skip_finalization()
