"""``POST /inference/v1/generate`` and ``score``: build the request from a call's arguments, and the result from the
reply."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import httpx
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rollout_service.client._http import parse, request_body
from rollout_service.errors import InvalidRequest, RolloutServiceError
from rollout_service.protocol.base import field_name
from rollout_service.protocol.generate import GenerateReply, GenerateRequest, Usage, WantedVersion
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.scoring import ScoreReply, ScoreRequest

Prompt = str | Sequence[int]
"""Text, which the gateway tokenizes, or token ids."""


class RequestOptions(TypedDict, total=False):
    """The options of ``generate``, ``generate_batch`` and ``score``; ``RolloutOptions`` defines them."""

    min_weight_version: int | str | None
    weight_version: WantedVersion | Mapping[str, int | str | None] | None
    adapter: str | None
    min_adapter_version: int | None
    session_id: str | None
    priority: int


class GenerateOptions(RequestOptions, total=False):
    """The options of ``generate`` and ``generate_batch``. ``Sampling`` and ``RolloutOptions`` define the defaults: one
    completion at temperature 1 from the whole vocabulary."""

    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    on_abort: OnAbort
    return_routed_experts: bool
    routed_experts_prompt_start: int | None
    add_special_tokens: bool | None


_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""JSON cannot carry these. In Python's strings, a pair is one character."""
_ABOUT_THE_REQUEST = (*RequestOptions.__annotations__, "on_abort", "return_routed_experts", "add_special_tokens")
"""The options that are not sampling parameters."""


def split_options(options: GenerateOptions) -> tuple[Sampling, dict[str, object]]:
    """Return the sampling parameters, and the other options. Raises InvalidRequest, as the service would."""
    given: dict[str, object] = dict(options)
    about = {name: given.pop(name) for name in _ABOUT_THE_REQUEST if name in given}
    try:
        return Sampling.model_validate(given), about
    except ValidationError as error:
        raise _refused("sampling parameters", error, given) from error


def request_from(prompt: Prompt, request_id: str | None, options: GenerateOptions) -> GenerateRequest:
    """Build a request from the options of ``generate``. Raises InvalidRequest, as the service would."""
    sampling, about = split_options(options)
    return request_of(prompt, sampling, request_id=request_id, **about)


def _refused(what: str, error: ValidationError, given: dict[str, object]) -> InvalidRequest:
    """Return an error that names each invalid parameter with its value and the reason."""
    wrong = {field_name(e["loc"]): e["msg"] for e in error.errors(include_url=False)}
    problems = ", ".join(f"{name}={given.get(name.partition('.')[0])!r}: {why}" for name, why in wrong.items())
    return InvalidRequest(f"{what} refused: {problems}", {"parameters": wrong})


def request_of(prompt: Prompt, sampling: Sampling, **options: object) -> GenerateRequest:
    """Build a request. Raises InvalidRequest, as the service would."""
    asked = (
        {"prompt": prompt, "output_mode": "text"} if isinstance(prompt, str) else {"token_ids": token_ids_of(prompt)}
    )
    if isinstance(prompt, str) and (half := _HALF_CHARACTER.search(prompt)) is not None:
        raise InvalidRequest(f"the prompt has half a surrogate pair at character {half.start()}: send Unicode text")
    try:
        return GenerateRequest.model_validate({**asked, "sampling_params": sampling, "flat_logprobs": True, **options})
    except ValidationError as error:
        raise _refused("options of the request", error, options) from error


def body_of(request: GenerateRequest) -> dict[str, object]:
    """Return the request as JSON, without fields at their default."""
    body = request.model_dump(mode="json", exclude_defaults=True)
    sampling: dict[str, object] = body.setdefault("sampling_params", {})
    sampling.setdefault("logprobs", 0)  # explicit, because vLLM's own default is no logprobs
    return body


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """Return plain ints from a list, an array or a tensor. Raises InvalidRequest for anything else."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InvalidRequest(
            f"a prompt is a str or a flat sequence of integer token ids, not {type(prompt).__name__} ({error})"
        ) from error


class _Reply(GenerateReply):
    """The reply with defaults for the fields that the client does not read."""

    model: str = ""
    created: int = 0
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)


def rollout_of(response: httpx.Response, request: GenerateRequest) -> Rollout:
    """Return the rollout of a reply. Raises RolloutServiceError if the reply contradicts itself or the request."""
    reply = parse(_Reply, response)
    prompt_token_ids = request.token_ids if reply.prompt_token_ids is None else reply.prompt_token_ids
    num_asked = request.sampling_params.n
    choices = sorted(reply.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(num_asked)) or prompt_token_ids is None:
        raise RolloutServiceError(
            f"reply {reply.request_id} has choices {[choice.index for choice in choices]} for n={num_asked} and "
            f"{'no ' if prompt_token_ids is None else ''}prompt_token_ids, which does not answer the request"
        )
    try:
        completions = tuple(choice.completion() for choice in choices)
    except ValueError as error:
        raise RolloutServiceError(f"reply {reply.request_id} contradicts itself: {error}") from error
    return Rollout(
        request_id=reply.request_id,
        prompt_token_ids=prompt_token_ids,
        completions=completions,
        replica_id=reply.replica_id,
        attempts=reply.attempts,
        cached_tokens=cached_tokens(reply.usage),
        truncated_sampling=reply.truncated_sampling,
    )


def cached_tokens(usage: Usage | None) -> int:
    """Return ``Rollout.cached_tokens`` of a reply."""
    details = None if usage is None else usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


class ScoreOptions(RequestOptions, total=False):
    """Further options of ``score``; ``ScoreRequest`` defines them."""

    request_id: str | None
    cache_salt: str | None


@dataclass(frozen=True)
class Scores:
    """Logprobs of tokens from ``start`` on, at temperature 1. Scored token ``i`` has the entries ``offsets[i]`` to
    ``offsets[i + 1]``."""

    start: int
    token_ids: npt.NDArray[np.uint32]
    """[entries]: for each scored token its own id, then the most likely tokens; or its target tokens."""
    logprobs: npt.NDArray[np.float32]
    """[entries]"""
    offsets: npt.NDArray[np.int64]
    """[scored tokens + 1]"""
    weight_version: int
    replica_id: str


def score_request(
    tokens: Sequence[int], target_token_ids: Sequence[Sequence[int]] | None, options: Mapping[str, object]
) -> ScoreRequest:
    """Build a request. Raises InvalidRequest, as the service would."""
    targets = None if target_token_ids is None else [token_ids_of(row) for row in target_token_ids]
    given = {"token_ids": token_ids_of(tokens), "target_token_ids": targets, "compact": True, **options}
    return request_body(ScoreRequest, **given)


def scores_of(response: httpx.Response) -> Scores:
    """Return the scores of a reply. Raises RolloutServiceError if the reply contradicts itself."""
    reply = parse(ScoreReply, response)
    if reply.compact_logprobs is None:
        raise RolloutServiceError(f"reply {reply.request_id} has no compact_logprobs")
    try:
        ids, logprobs = reply.compact_logprobs.unpacked()
    except ValueError as error:
        raise RolloutServiceError(f"reply {reply.request_id} contradicts itself: {error}") from error
    offsets = np.array(reply.compact_logprobs.offsets, np.int64)
    return Scores(reply.start, ids, logprobs, offsets, int(reply.weight_version), reply.replica_id)
