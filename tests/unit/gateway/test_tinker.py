"""Samples of Tinker's SDK: what is kept, and what reaches the engine. ``tests/clients/test_tinker.py`` has the SDK."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout_service.errors import InvalidRequest, NotReady, SampleGone, TooManySamples
from rollout_service.gateway import tinker_samples
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.tinker import Sample, Tensor, sample_response
from rollout_service.gateway.tinker_samples import KEPT_S, Samples
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.sampling import Scoring
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.gateway.fakes import http_to

PROMPT = [5, 6, 7]
SAMPLE: dict[str, Any] = {
    "sampling_session_id": "s",
    "seq_id": 0,
    "prompt": {"chunks": [{"tokens": PROMPT}]},
    "sampling_params": {},
}
LONG = "tinker://" + "x" * 20_000
EMPTY = Completion(index=0, token_ids=(), logprobs=(), finish_reason="stop", spans=())
Post = Callable[..., Awaitable[Any]]


def of(*completions: Completion) -> Rollout:
    return Rollout(request_id="r", prompt_token_ids=tuple(PROMPT), completions=completions, replica_id="a")


def asked(**fields: object) -> Sample:
    return Sample.model_validate(SAMPLE | fields)


@pytest.fixture
def post(services: Services) -> Post:
    async def post(path: str, at: Services = services, **body: object) -> Any:
        async with http_to(at) as http:
            return await http.post(f"/api/v1/{path}", json=body)

    return post


async def ready() -> bytes:
    return b"ready"


async def sample(post: Post, **fields: object) -> Any:
    """Send a sample, and return the reply with its result."""
    session = (await post("create_session")).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = (await post("create_sampling_session", **body)).json()["sampling_session_id"]
    told = await post("asample", **(SAMPLE | {"sampling_session_id": sampler} | fields))
    assert told.status_code == 200, told.text
    return await post("retrieve_future", request_id=told.json()["request_id"])


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ((), (), False)),
        ([], ((), (), True)),
        ("a", (("a",), (), False)),
        (["a", "b"], (("a", "b"), (), False)),
        ([7, 8], ((), (7, 8), False)),
    ],
)
async def test_stop_reaches_the_engine(post, engine, stop, expected):
    reply = await sample(post, sampling_params={"stop": stop, "max_tokens": 3, "top_k": -1, "seed": 4}, num_samples=2)
    assert reply.headers["content-type"] == "application/x-protobuf"
    [call] = engine.calls
    assert (call.sampling.stop, call.sampling.stop_token_ids, call.sampling.ignore_eos) == expected
    assert (call.sampling.n, call.sampling.seed, call.prompt_token_ids) == (2, 4, (5, 6, 7))


@pytest.mark.parametrize(("end", "told"), [("stop", 0), ("length", 1), ("abort", 1)])
def test_a_sample_cut_short_is_not_told_as_complete(end, told):
    assert sample_response(of(EMPTY.model_copy(update={"finish_reason": end})), asked())[2:4] == bytes([8, told])


def test_more_prompt_logprobs_than_there_are_are_all():
    rollout = of(
        EMPTY.model_copy(update={"prompt_logprobs": (None, (Candidate(6, -1.0, 1),), (Candidate(7, -2.0, 1),))})
    )

    def told(last_n: int) -> bytes:
        return sample_response(rollout, asked(prompt_logprobs=True, prompt_logprobs_last_n=last_n))

    assert told(3) == told(4) == told(6) != told(1)


async def test_target_tokens_are_scored_beside_the_prompt(post, engine):
    engine.scores = CompactLogprobs.of([6, 3, 4, 7], [-0.5, -0.25, -1.5, -2.0], [0, 3, 4], 0)
    targets = {"data": [3, 4, -1, -1], "dtype": "int64", "shape": [2, 2]}
    reply = await sample(post, target_prompt_logprobs=targets, prompt_logprobs=True)
    assert reply.headers["content-type"] == "application/x-protobuf"
    [call] = engine.calls
    assert call.scoring == Scoring(start=1, target_token_ids=((6, 3, 4), (7,)))
    assert call.sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"target_prompt_logprobs": {"data": [3, 4], "dtype": "int64", "shape": [2, 1]}, "prompt_logprobs": True},
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 1},
    ],
    ids=["targets", "own", "top"],
)
def test_logprobs_of_the_prompt_come_from_any_completion(fields):
    """The first one's replica was lost after it ended, or its continuation has failed."""
    lost, sample = EMPTY.model_copy(update={"finish_reason": "abort"}), asked(**fields)
    found = {
        "index": 1,
        "prompt_logprobs": (None, (Candidate(6, -1.0, 2), Candidate(9, -0.5, 1)), (Candidate(7, -2.0, 1),)),
        "scores": CompactLogprobs.of([6, 3, 7, 4], [-1.0, -1.5, -2.0, -2.5], [0, 2, 4], 0),
    }
    whole = EMPTY.model_copy(update=found)
    assert sample_response(of(lost, whole), sample).endswith(sample_response(of(whole), sample))
    with pytest.raises(NotReady, match=r"r lost its replica .*: send it again"):
        sample_response(of(lost, lost), sample)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sampling_params": {"temperature": 9}}, "temperature"),
        ({"topk_prompt_logprobs": 21}, "prompt_logprobs=21"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "1 rows, and 2 tokens"),
        ({"target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [2, 2]}}, "3 ids, and 4"),
    ],
)
async def test_errors_of_a_sample_are_its_result(post, fields, why):
    reply = (await sample(post, **fields)).json()
    assert why in reply["error"] and reply["category"] == "user"


async def test_a_shape_beyond_any_number_is_refused(post):
    targets = {"data": [1], "dtype": "int64", "shape": [10**4000] * 2}  # Python cannot write its number of cells
    told = await post("asample", **SAMPLE, target_prompt_logprobs=targets)
    assert told.status_code == 422 and "target_prompt_logprobs.shape.0" in told.json()["error"]["message"], told.text


async def test_several_gateways_refuse_sessions(post, services):
    reply = await post("create_session", replace(services, samples=None))
    assert reply.status_code == 422 and "scaling.gateways" in reply.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("retrieve_future", {"request_id": LONG}, 410),
        *(
            ("create_sampling_session", {"session_id": "0" * 32, "sampling_session_seq_id": 0, field: LONG}, 422)
            for field in ("base_model", "model_path")
        ),
    ],
)
async def test_a_long_name_is_not_repeated_whole(post, path, body, status):
    reply = await post(path, **body)
    assert reply.status_code == status and len(reply.content) < 4096


@pytest.mark.parametrize("path", ["create_model", "forward_backward", "optim_step", "save_weights_for_sampler"])
async def test_training_is_refused_by_name(post, path):
    reply = await post(path, model_id="m")
    assert reply.status_code == 422 and "push_adapter" in reply.text


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"data": (1, -1, 2, 3), "shape": (2, 2)}, [(1,), (2, 3)]),
        (
            {"data": (4, 5), "shape": (3, 9), "sparse_crow_indices": (0, 0, 2, 2), "sparse_col_indices": (1, 8)},
            [(), (4, 5), ()],
        ),
    ],
)
def test_rows_of_targets_leave_empty_cells_out(fields, rows):
    assert Tensor(dtype="int64", **fields).rows() == rows


@pytest.mark.parametrize(
    ("crow", "columns"),
    [
        *((crow, (0, 1)) for crow in [(0, 2, 1), (0, 1), (0, 1, 3), (1, 1, 2)]),
        *(((0, 1, 2), columns) for columns in [(0, 2), (-1, 0), (0, 2**64)]),
    ],
)
def test_indices_that_are_no_matrix_are_refused(crow, columns):
    targets = Tensor(data=(1, 2), dtype="int64", shape=(2, 2), sparse_crow_indices=crow, sparse_col_indices=columns)
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs"):
        targets.rows()


async def test_samples_that_nobody_polls_are_cancelled(monkeypatch):
    monkeypatch.setattr(tinker_samples, "POLL_S", 0.0)
    now, cancelled = 0.0, list[str]()
    samples = Samples(clock=lambda: now)

    async def wait(name: str) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)
        return b""

    for name in ("left", "polled"):
        samples.start(name, lambda name=name: wait(name))
    now = KEPT_S / 2
    assert await samples.result("polled") is None
    now = KEPT_S + 1
    samples.start("next", lambda: wait("next"))
    await asyncio.sleep(0)
    assert cancelled == ["left"] and await samples.result("polled") is None


def test_samples_run_once_and_expire_though_no_other_comes():
    async def program() -> None:
        loop, cancelled, made = asyncio.get_running_loop(), list[bool](), list[bool]()
        samples = Samples(clock=loop.time)

        async def ready() -> bytes:
            made.append(True)
            return b"ready"

        async def wait() -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)
            return b""

        for number in (1, 2):
            samples.start("ready", ready)
            samples.start("ready", ready)
            samples.start("left", wait)
            await asyncio.sleep(KEPT_S - 1)
            assert await samples.result("ready") == await samples.result("ready") == b"ready"
            assert len(made) == number and len(cancelled) == number - 1
            await asyncio.sleep(3)
            with pytest.raises(SampleGone):
                await samples.result("ready")
            assert len(cancelled) == number

    run_in_virtual_time(program())


def test_a_full_gateway_keeps_results_while_no_other_sample_comes(monkeypatch):
    monkeypatch.setattr(tinker_samples, "MAX_SAMPLES", 1)

    async def program() -> None:
        samples = Samples(clock=asyncio.get_running_loop().time)

        samples.start("a", ready)
        await asyncio.sleep(KEPT_S / 2)
        assert await samples.result("a") == b"ready"

    run_in_virtual_time(program())


async def test_full_gateway_forgets_results_and_refuses_more(monkeypatch):
    monkeypatch.setattr(tinker_samples, "MAX_SAMPLES", 2)
    monkeypatch.setattr(tinker_samples, "POLL_S", 0.0)
    samples, goes_on = Samples(), asyncio.Event()

    async def wait() -> bytes:
        await goes_on.wait()
        return b""

    samples.start("old", ready)
    samples.start("runs", wait)
    while await samples.result("old") is None:
        await asyncio.sleep(0)
    assert await samples.result("runs") is None
    samples.start("new", wait)
    with pytest.raises(SampleGone):
        await samples.result("old")
    with pytest.raises(TooManySamples):
        samples.start("more", wait)
    samples.cancel("new")
    samples.start("more", ready)
    goes_on.set()
    while await samples.result("runs") is None:
        await asyncio.sleep(0)


async def test_results_that_are_large_together_are_forgotten_in_the_order_of_their_ends(monkeypatch):
    monkeypatch.setattr(tinker_samples, "MAX_BYTES", 10)
    samples, goes_on = Samples(), asyncio.Event()

    async def make(result: bytes, waits: bool = False) -> bytes:
        if waits:
            await goes_on.wait()
        return result

    samples.start("slow", lambda: make(b"123456", waits=True))
    samples.start("fast", lambda: make(b"12345"))
    assert await samples.result("fast") == await samples.result("fast") == b"12345"
    goes_on.set()
    assert await samples.result("slow") == await samples.result("slow") == b"123456"
    with pytest.raises(SampleGone):
        await samples.result("fast")
    samples.start("huge", lambda: make(b"12345678901"))
    assert await samples.result("huge") == b"12345678901"  # polled for while it was made
    with pytest.raises(SampleGone):
        await samples.result("huge")
    samples.start("next", lambda: make(b"1234567890"))
    assert await samples.result("next") == await samples.result("next") == b"1234567890"


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ({"prompt": {"chunks": [0] * 100}}, 1),
        ({"sampling_params": {"stop": [1.5] * 100}}, 3),
        ({"num_samples": 0}, 1),
        ({"num_samples": 4097}, 1),
    ],
)
async def test_a_sample_out_of_bounds_has_few_problems(post, engine, field, most):
    reply = await post("asample", **(SAMPLE | field))
    assert reply.status_code == 422 and reply.json()["error"]["detail"]["problems"] <= most, reply.text
    assert next(iter(field)) in reply.text and not engine.calls
