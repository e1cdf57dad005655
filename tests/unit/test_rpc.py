"""Questions to the ingest, through Ray itself: its errors come as they are, and whatever else means that it is away."""

from typing import Any

import pytest
import ray
from ray.serve.exceptions import DeploymentUnavailableError

from rollout_service.errors import LogCorrupt, NotFound, NotReady, RolloutServiceError
from rollout_service.rpc import ask, unreachable


@pytest.fixture
def ingest(object_store: None) -> Any:
    """An actor that answers as it is told."""

    @ray.remote(num_cpus=0)
    class Ingest:
        async def answer(self, *args: object) -> object:
            for arg in args:
                if isinstance(arg, Exception):
                    raise arg
            return args

    return Ingest.remote()


async def test_the_answer_is_that_of_the_method_to_the_same_arguments(ingest: Any) -> None:
    assert await ask(ingest, "answer", 1, "two", {"three": 3.0}) == (1, "two", {"three": 3.0})
    assert await ask(ingest, "answer") == ()


@pytest.mark.parametrize("error", [NotFound("gone", {"version": 7}), NotReady("soon"), LogCorrupt("torn")])
async def test_an_error_of_ours_is_raised_as_it_was(ingest: Any, error: RolloutServiceError) -> None:
    with pytest.raises(RolloutServiceError) as raised:
        await ask(ingest, "answer", error)
    assert type(raised.value) is type(error)
    assert (raised.value.message, raised.value.detail) == (error.message, error.detail)


async def test_any_other_error_of_the_ingest_counts_as_no_answer_and_is_told(ingest: Any) -> None:
    with pytest.raises(NotReady, match=r"the ingest, which has the log, does not answer(.|\n)*disk on fire") as raised:
        await ask(ingest, "answer", OSError("disk on fire"))
    assert raised.value.__cause__ is not None


async def test_an_ingest_that_has_died_does_not_answer(ingest: Any) -> None:
    ray.kill(ingest)
    with pytest.raises(NotReady, match="does not answer"):
        await ask(ingest, "answer", 1)


class Unavailable:
    """A handle of a deployment that Serve does not run."""

    @property
    def answer(self) -> "Unavailable":
        return self

    async def remote(self, *_: object) -> None:
        raise DeploymentUnavailableError("ingest")


async def test_a_deployment_that_serve_does_not_run_does_not_answer() -> None:
    with pytest.raises(NotReady, match="does not answer"):
        await ask(Unavailable(), "answer")


async def test_a_mistake_of_ours_is_not_taken_for_an_ingest_that_is_away(ingest: Any) -> None:
    with pytest.raises(AttributeError, match="mispelt"):
        await ask(ingest, "mispelt")


def test_what_is_said_of_an_ingest_that_is_away_has_the_reason() -> None:
    assert str(unreachable(ValueError("why"))).endswith("does not answer: why")
