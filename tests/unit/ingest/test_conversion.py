"""Buckets are converted, forgotten and begun again, by threads that begin in any order."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.ingest.conversion import Bucket, Conversion
from rollout_service.model.convert import Converter
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
        self.tasks.append(lambda: future.set_running_or_notify_cancel() and future.set_result(fn(*args, **kwargs)))
        return future


@pytest.fixture
def executor() -> InOrderOf:
    return InOrderOf()


@pytest.fixture
def conversion(tmp_path: Path, executor: InOrderOf) -> Iterator[Conversion]:
    writer = VersionWriter(tmp_path, Layout(TensorSlot(name=name, dtype="bfloat16", shape=(2,)) for name in NAMES))
    yield Conversion(1, writer, Converter(TrainerRecipe(weights="none"), device="cpu").convert, executor)
    writer.close()


def of(value: float, *names: str) -> Bucket:
    return Bucket(names, lambda: ((name, torch.full((2,), value, dtype=torch.bfloat16)) for name in names))


async def test_a_bucket_that_is_begun_again_forgets_its_failure(conversion, executor):
    conversion.begin(of(1.0, "a", "b"), 0)
    conversion.begin(of(float("nan"), "c", "d"), 1)
    for task in executor.tasks:
        task()
    assert conversion.failure is not None and conversion.failure.message.startswith("c[")
    await conversion.forget([1])
    assert conversion.failure is None
    conversion.begin(of(2.0, "c", "d"), 1)
    executor.tasks[-1]()
    assert conversion.failure is None and conversion.read_bytes == 16


async def test_a_bucket_that_waits_is_not_converted_once_forgotten(conversion, executor):
    waiting = conversion.begin(of(float("nan"), "a"), 0)
    await conversion.forget([0])
    assert waiting.cancelled()
    conversion.begin(of(1.0, *NAMES), 0)
    executor.tasks[-1]()
    assert conversion.failure is None and conversion.read_bytes == 4 * len(NAMES)


async def test_the_files_stay_open_while_a_forgotten_bucket_is_read(conversion, executor):
    running, waiting = conversion.begin(of(1.0, "a"), 0), conversion.begin(of(1.0, "b"), 0)
    running.set_running_or_notify_cancel()
    forgetting = [asyncio.create_task(conversion.forget([0])) for _ in range(2)]
    stopping = asyncio.create_task(conversion.stop())
    await asyncio.sleep(0)
    assert waiting.cancelled() and not stopping.done()
    running.set_result(None)
    await asyncio.gather(*forgetting, stopping)


async def test_a_failure_of_a_bucket_without_a_key_ends_the_version(conversion, executor):
    conversion.begin(of(float("nan"), "a"))
    conversion.begin(of(1.0, "b"))
    for task in executor.tasks:
        task()
    assert conversion.failure is not None and conversion.read_bytes == 4
