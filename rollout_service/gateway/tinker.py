"""The routes by which Tinker's SDK samples: ``create_sampling_client``, ``sample`` and ``compute_logprobs``.

The SDK starts a sample, and polls for its result. The gateway keeps samples in memory. The id of a sampling session has
all that the session is. A sample is sent as the protobuf message ``SampleResponse`` of the SDK 0.38, the only form that
it reads. Training is refused by name.
"""

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from rollout_service.errors import InvalidRequest, NotFound, NotReady, SampleGone, TooManySamples
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.prompts import DATA_ERRORS, find_adapter, model_and_adapter, roll_out
from rollout_service.gateway.routes import OpenRoute, PromptsRoute
from rollout_service.gateway.score import check_targets
from rollout_service.gateway.tinker_samples import Samples
from rollout_service.protocol.adapters import read_adapter_name
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.generate import ModelName, RolloutOptions, TokenIds
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.sampling import MOST_COMPLETIONS, Sampling, Scoring
from rollout_service.web.errors import documented

router = APIRouter(prefix="/api/v1", tags=["tinker"], route_class=OpenRoute)

_NO_TRAINING = (
    "training is not implemented here: train with your own loop, and push the adapter with "
    "RolloutClient.push_adapter or POST /v1/load_lora_adapter"
)
_STOP, _LENGTH = 0, 1
_FLOAT32 = 1
_NO_LOGPROB = -99999.0
"""Logprob of an empty cell of a top-k matrix, whose token id is 0."""
_Found = TypeVar("_Found")

Id = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9@._~-]+$")]
"""The id of a session or a request."""
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
PATH = "tinker://"
"""The beginning of an adapter's path."""


class Ignored(BaseModel):
    """A body without effect."""

    model_config = ConfigDict(extra="allow")


class CreateSamplingSession(Frozen):
    """Body of ``POST /api/v1/create_sampling_session``."""

    session_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sampling_session_seq_id: int = Field(ge=0, le=2**63 - 1)
    base_model: ModelName | None = None
    """A name of the served model."""
    model_path: ModelName | None = None
    """An adapter: ``tinker://run-a`` is its newest version at each sample, ``tinker://run-a@3`` exactly that one."""
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @property
    def adapter(self) -> str | None:
        """Return the adapter in ``model_path``; None: the model itself. Raises InvalidRequest."""
        if self.model_path is None:
            return None
        name = self.model_path.removeprefix(PATH)
        if not self.model_path.startswith(PATH) or read_adapter_name(name) is None:
            raise InvalidRequest(
                f"model_path={self.model_path!r} is no adapter here: push one with push_adapter, and name it as "
                f"{PATH}run-a or {PATH}run-a@3"
            )
        return name

    def sampler_id(self) -> str:
        """Return the id of the sampling session. It has all that the session is, so that no gateway keeps any."""
        return f"{self.session_id}-{self.sampling_session_seq_id}~{self.adapter or ''}"


def adapter_of(sampler_id: str) -> str | None:
    """Return the adapter of a sampling session; None: the model itself."""
    return sampler_id.partition("~")[2] or None


class Chunk(Frozen):
    """Tokens of a prompt."""

    tokens: TokenIds
    type: Literal["encoded_text"] = "encoded_text"
    """Images and audio are refused."""


class ModelInput(Frozen):
    """A prompt."""

    chunks: Annotated[tuple[Chunk, ...], Field(fail_fast=True)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the prompt's tokens."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingParams(Frozen):
    """Tinker's sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: (
        str
        | Annotated[tuple[str, ...], Field(fail_fast=True)]
        | Annotated[tuple[int, ...], Field(fail_fast=True)]
        | None
    ) = None
    """``[]``: nothing ends a completion, not even the end of sequence."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def sampling(self, **more: object) -> Sampling:
        """Return the service's parameters. Raises pydantic.ValidationError."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Sampling.model_validate(
            {
                **self.model_dump(exclude={"stop"}),
                "stop": [each for each in stop if isinstance(each, str)],
                "stop_token_ids": [each for each in stop if isinstance(each, int)],
                "ignore_eos": self.stop == (),
                **more,
            }
        )


class Tensor(Frozen):
    """A matrix of token ids, dense or as CSR."""

    data: TokenIds
    dtype: Literal["int64"]
    shape: tuple[_Size, _Size]
    sparse_crow_indices: TokenIds | None = None
    sparse_col_indices: TokenIds | None = None

    def rows(self) -> list[tuple[int, ...]]:
        """Return the ids in each row, without those that ask for nothing (-1). Raises InvalidRequest."""
        (height, width), starts = self.shape, self.sparse_crow_indices
        columns = () if starts is None else self.sparse_col_indices or ()
        cells = height * width if starts is None else len(columns)
        if len(self.data) != cells:
            raise InvalidRequest(f"target_prompt_logprobs has {len(self.data)} ids, and {cells} belong to its shape")
        if starts is None:
            starts = tuple(range(0, cells + 1, width))
        ascending = all(a <= b for a, b in pairwise(starts))
        are_inside = all(0 <= column < width for column in columns)
        if len(starts) != height + 1 or not ascending or (starts[0], starts[-1]) != (0, cells) or not are_inside:
            raise InvalidRequest(f"target_prompt_logprobs: its indices are not those of a {list(self.shape)} matrix")
        found = [self.data[a:b] for a, b in pairwise(starts)]
        return [tuple(each for each in row if each != -1) for row in found]


class Sample(Frozen):
    """Body of ``POST /api/v1/asample``."""

    sampling_session_id: Id
    seq_id: int = Field(ge=0, le=2**63 - 1)
    """Number of the sample in its session. The same number names the same sample."""
    num_samples: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    """Needs a GPU."""
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    prompt_alt_tokens_k: Literal[0] = 0
    """Draws at each position of the prompt: not implemented."""
    record_stability_info: Literal[False] | None = None
    """For training: not implemented."""
    base_model: None = None
    """The sampling session has it."""
    model_path: None = None
    type: Literal["sample"] = "sample"

    @property
    def request_id(self) -> str:
        """Return the sample's id."""
        return f"{self.sampling_session_id}~{self.seq_id}"

    def sampling(self) -> Sampling:
        """Return the parameters for an engine. Raises pydantic.ValidationError."""
        wants_prompt = bool(self.prompt_logprobs or self.topk_prompt_logprobs) and self.target_prompt_logprobs is None
        return self.sampling_params.sampling(
            n=self.num_samples,
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=self.topk_prompt_logprobs if wants_prompt else None,
        )

    def scoring(self) -> Scoring | None:
        """Return the target tokens, each prompt token before those of its position. Raises InvalidRequest."""
        if self.target_prompt_logprobs is None:
            return None
        if self.topk_prompt_logprobs:
            raise InvalidRequest("topk_prompt_logprobs and target_prompt_logprobs are given: send one of them")
        rows, scored = self.target_prompt_logprobs.rows(), self.prompt.token_ids[1:]
        if len(rows) != len(scored):
            raise InvalidRequest(
                f"target_prompt_logprobs has {len(rows)} rows, and {len(scored)} tokens follow the prompt's first: "
                "send a row for each"
            )
        targets = tuple((token, *row) for token, row in zip(scored, rows, strict=True))
        return Scoring(start=1, target_token_ids=targets)


class RetrieveFuture(BaseModel):
    """Body of ``POST /api/v1/retrieve_future`` and ``/api/v1/cancel_future``."""

    request_id: str
    allow_metadata_only: bool = False
    """Not used: the whole result is returned."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer that the gateway runs."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(services: Here) -> dict[str, object]:
    """Return the served model's names. None can be trained here."""
    about = {"max_context_length": services.max_model_len, "trainable": False, "sampleable": True}
    return {"supported_models": [{"model_name": name, **about} for name in (services.name, *services.aliases)]}


@router.post("/client/config")
async def config(body: Ignored) -> dict[str, object]:
    """Return no flags: the SDK's defaults hold."""
    return {}


@router.post("/client/dynamic_config")
async def dynamic_config(body: Ignored) -> dict[str, object]:
    """Tell the SDK to cancel abandoned samples."""
    return {"sample_cancel_enabled": True}


@router.post("/create_session", responses=documented(InvalidRequest))
async def create_session(body: Ignored, services: Here) -> dict[str, str]:
    """Return a new session id. Needs ``scaling.gateways: 1``."""
    _samples(services)
    return {"type": "create_session", "session_id": uuid.uuid4().hex}


@router.post("/session_heartbeat")
async def heartbeat(body: Ignored) -> dict[str, str]:
    """Accept a sign of life. Sessions do not end."""
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: Id, body: Ignored | None = None) -> dict[str, str]:
    """Accept the end of a session."""
    return {"status": "ok"}


@router.post("/telemetry")
async def telemetry(body: Ignored) -> dict[str, str]:
    """Accept the SDK's telemetry, and drop it."""
    return {"status": "accepted"}


@router.post("/create_sampling_session", responses=documented(InvalidRequest, NotFound))
async def create_sampling_session(body: CreateSamplingSession, services: Here) -> dict[str, str]:
    """Return the id of a sampling session of the served model, or of an adapter as ``model_path: tinker://run-a``."""
    if body.base_model is not None:
        await model_and_adapter(body.base_model, None, services)
    await find_adapter(RolloutOptions(adapter=body.adapter), services)
    return {"type": "create_sampling_session", "sampling_session_id": body.sampler_id()}


def _samples(services: Services) -> Samples:
    if services.samples is None:
        raise InvalidRequest("each of several gateways would know only its own samples: set scaling.gateways to 1")
    return services.samples


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: Id, services: Here) -> dict[str, str | None]:
    """Return the model and the adapter of a sampling session."""
    adapter = adapter_of(sampler_id)
    path = None if adapter is None else PATH + adapter
    return {"sampler_id": sampler_id, "base_model": services.name, "model_path": path}


async def asample(body: Sample, services: Here) -> dict[str, object]:
    """Start a sample. Its errors are those of its result."""
    _samples(services).start(body.request_id, lambda: _sample(body, services))
    ids = [f"{body.request_id}~{index}" for index in range(body.num_samples)]
    return {"request_id": body.request_id, "sample_sequence_ids": ids}


async def _sample(body: Sample, services: Services) -> bytes:
    scoring = body.scoring()
    if scoring is not None and scoring.target_token_ids is not None:
        check_targets("target_prompt_logprobs", scoring.target_token_ids, scoring.start, services)
    options = RolloutOptions(adapter=adapter_of(body.sampling_session_id))
    rollout = await roll_out(body.prompt.token_ids, body.sampling(), services, options, scoring=scoring)
    return await asyncio.to_thread(sample_response, rollout, body)


router.add_api_route(
    "/asample",
    asample,
    methods=["POST"],
    responses=DATA_ERRORS | documented(TooManySamples),
    route_class_override=PromptsRoute,
)


@router.post("/retrieve_future", responses=documented(SampleGone), response_class=Response)
async def retrieve_future(body: RetrieveFuture, services: Here) -> Response:
    """Return a sample as protobuf or its error as JSON; 408 after a while, to poll again."""
    result = await _samples(services).result(body.request_id)
    if result is None:
        again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(again, status_code=408)
    if isinstance(result, bytes):
        return Response(result, media_type="application/x-protobuf")
    return JSONResponse(result)


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: RetrieveFuture, services: Here) -> None:
    """Stop a sample."""
    _samples(services).cancel(body.request_id)


async def refuse(body: Ignored | None = None) -> dict[str, str]:
    """Refuse the request: training is not implemented."""
    raise InvalidRequest(_NO_TRAINING)


for _name in (
    *("create_model", "get_info", "forward", "forward_backward", "optim_step", "unload_model", "create_custom_loss"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "copy_weights"),
    "weights_info",
):
    router.post(f"/{_name}", responses=documented(InvalidRequest))(refuse)


def sample_response(rollout: Rollout, asked: Sample) -> bytes:
    """Return the message. Raises NotReady if no completion came with the prompt's logprobs, which were asked for."""
    parts = [_bytes(1, b"".join(_sequence(each, asked.topk_sample_logprobs))) for each in rollout.completions]
    tokens = rollout.prompt_token_ids
    positions = len(tokens)
    unscored = 1 if asked.prompt_logprobs_last_n is None else max(1, positions - asked.prompt_logprobs_last_n)
    prompt, rows = np.full(positions, np.nan, "<f4"), list[Sequence[Candidate]]()
    if asked.target_prompt_logprobs is not None:
        prompt[1:], targets = _split(_first(rollout, (each.scores for each in rollout.completions)))
        parts.append(_bytes(5, b"".join(_tensor(targets, asked.target_prompt_logprobs))))
    elif asked.prompt_logprobs or asked.topk_prompt_logprobs:
        rows = [at or () for at in _first(rollout, (each.prompt_logprobs for each in rollout.completions))]
        prompt[1:] = [
            next(each.logprob for each in row if each.token_id == token)
            for token, row in zip(tokens[1:], rows[1:], strict=True)
        ]
    prompt[:unscored] = np.nan
    if asked.prompt_logprobs:
        parts.append(_bytes(2, prompt.tobytes()))
    if asked.topk_prompt_logprobs:
        rows = [() if at < unscored else row[1:] for at, row in enumerate(rows)]
        parts.append(_bytes(3, b"".join(_top(rows, asked.topk_prompt_logprobs))))
    return b"".join(parts)


def _first(rollout: Rollout, found: Iterable[_Found | None]) -> _Found:
    """Return the first that is there: a completion whose replica was lost has no logprobs of the prompt."""
    for each in found:
        if each is not None:
            return each
    raise NotReady(f"{rollout.request_id} lost its replica after the prompt was scored: send it again")


def _sequence(completion: Completion, top: int) -> Iterator[bytes]:
    # Tinker has no other reason for a completion that was cut short
    yield _number(1, _STOP if completion.finish_reason == "stop" else _LENGTH)
    yield _bytes(2, np.asarray(completion.token_ids, "<i4").tobytes())
    yield _bytes(3, np.asarray(completion.logprobs, "<f4").tobytes())
    if top and completion.top_logprobs is not None:
        yield _bytes(4, b"".join(_top(completion.top_logprobs, top)))


def _top(rows: Sequence[Sequence[Candidate]], top: int) -> Iterator[bytes]:
    ids, logprobs = np.zeros((len(rows), top), "<i4"), np.full((len(rows), top), _NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        likeliest = row[:top]
        ids[at, : len(likeliest)] = [each.token_id for each in likeliest]
        logprobs[at, : len(likeliest)] = [each.logprob for each in likeliest]
    yield from (_bytes(1, ids.tobytes()), _bytes(2, logprobs.tobytes()), _number(3, top), _number(4, len(rows)))


def _split(scores: CompactLogprobs) -> tuple[npt.NDArray[np.float32], list[float]]:
    """Return the logprobs of the prompt's tokens, which come first at each position, and those of the targets."""
    _, logprobs = scores.unpacked()
    rows = [logprobs[a:b] for a, b in pairwise(scores.offsets)]
    return np.array([row[0] for row in rows], "<f4"), [float(each) for row in rows for each in row[1:]]


def _tensor(logprobs: list[float], asked: Tensor) -> Iterator[bytes]:
    """Return the logprobs in the layout of the ids that were asked for; 0 where there was none."""
    values, wanted = np.zeros(len(asked.data), "<f4"), np.asarray(asked.data, np.int64) != -1
    values[wanted] = logprobs
    if asked.sparse_crow_indices is None or asked.sparse_col_indices is None:
        yield _bytes(1, values.tobytes())
    else:
        indices = (np.asarray(each, "<i8") for each in (asked.sparse_crow_indices, asked.sparse_col_indices))
        crow, col = (each.tobytes() for each in indices)
        yield _bytes(2, _bytes(1, values.tobytes()) + _bytes(2, crow) + _bytes(3, col))
    yield _number(3, _FLOAT32)
    yield _bytes(4, b"".join(map(_varint, asked.shape)))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Return a number in protobuf's variable length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
