"""Batches that wait for a thread and are converted together, by threads that begin in any order."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.ingest.conversion import Conversion
from rollout_service.model.convert import Converter, Named
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.store.layout import Layout
from rollout_service.store.writer import VersionWriter

NAMES = ["a", "b", "c", "d"]


class InOrderOf(Executor):
    """Its tasks begin when, and in the order in which, a test says."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future


@pytest.fixture
def reads() -> list[list[str]]:
    """What was read at once."""
    return []


@pytest.fixture
def read(reads: list[list[str]]) -> Callable[[Sequence[str]], Iterator[Named]]:
    def read(names: Sequence[str]) -> Iterator[Named]:
        reads.append(list(names))
        return ((name, torch.ones(2, dtype=torch.bfloat16)) for name in names)

    return read


@pytest.fixture
def conversion(tmp_path: Path) -> Iterator[Conversion]:
    writer = VersionWriter(tmp_path, Layout(TensorSlot(name=name, dtype="bfloat16", shape=(2,)) for name in NAMES))
    yield Conversion(1, writer, Converter(TrainerRecipe(weights="none"), device="cpu").convert, InOrderOf())
    writer.close()


def test_a_thread_takes_what_has_come_and_the_next_ones_what_is_left(
    conversion: Conversion, read: Callable[[Sequence[str]], Iterator[Named]], reads: list[list[str]]
) -> None:
    executor, converted = InOrderOf(), list[str]()
    for name in NAMES:
        conversion.begin_together([name], read, converted.extend, executor, most=3)
    for task in executor.tasks:
        task()
    assert reads == [["a", "b", "c"], ["d"]] and converted == NAMES


def test_a_thread_that_begins_after_a_replacement_takes_nothing_that_came_before(
    conversion: Conversion, read: Callable[[Sequence[str]], Iterator[Named]], reads: list[list[str]]
) -> None:
    """The replacement does not wait for it, and what it stores would be stored last."""
    executor = InOrderOf()
    for name in ("a", "b"):
        conversion.begin_together([name], read, lambda names: None, executor, most=3)
    conversion.begin_replaceable([["a"]], read, lambda names: None, instead_of=lambda: None)
    conversion.begin_together(["c"], read, lambda names: None, executor, most=3)
    executor.tasks[2]()
    assert reads == [["c"]]
    executor.tasks[0]()
    executor.tasks[1]()
    assert reads == [["c"], ["a", "b"]]
