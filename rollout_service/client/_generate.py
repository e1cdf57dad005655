"""The body of ``POST /inference/v1/generate`` and the reply to it."""

import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from rollout_service.client._http import parse
from rollout_service.errors import InvalidRequest, RolloutServiceError
from rollout_service.protocol.rollout import Completion, FinishReason, OnAbort, Rollout, Span
from rollout_service.protocol.sampling import Sampling

Prompt = str | Sequence[int]
"""Text, which the gateway tokenizes, or token ids."""


class GenerateOptions(TypedDict, total=False):
    """What ``generate_batch`` passes to ``generate`` for every prompt; the defaults are there."""

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
    min_weight_version: int | None
    session_id: str | None
    priority: int
    on_abort: OnAbort


def sampling_of(**parameters: Any) -> Sampling:
    """Check sampling parameters before they travel. Raises InvalidRequest, as the service would."""
    try:
        return Sampling(**parameters)
    except ValidationError as error:
        wrong = {".".join(map(str, e["loc"])): e["msg"] for e in error.errors(include_url=False)}
        given = ", ".join(f"{name}={parameters.get(name.partition('.')[0])!r}: {why}" for name, why in wrong.items())
        raise InvalidRequest(f"sampling parameters refused: {given}", {"parameters": wrong}) from error


def request_body(prompt: Prompt, sampling: Sampling, **options: Any) -> dict[str, Any]:
    """JSON of one request; parameters at their default stay out of it."""
    body: dict[str, Any] = {"sampling_params": sampling.model_dump(mode="json", exclude_defaults=True)}
    body["sampling_params"]["logprobs"] = 0
    body["flat_logprobs"] = True
    if isinstance(prompt, str):
        body |= {"prompt": prompt, "output_mode": "text"}
    else:
        body["token_ids"] = token_ids_of(prompt)
    return body | {name: value for name, value in options.items() if value != _DEFAULTS.get(name)}


_DEFAULTS = {"priority": 0, "on_abort": "continue"}
"""Of the options that are not sampling parameters; None for the others."""


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """Plain ints, from a list, an array or a tensor. Raises InvalidRequest for anything else."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InvalidRequest(
            f"a prompt is a str or a flat sequence of integer token ids, not {type(prompt).__name__} ({error})"
        ) from error


def parse_rollout(response: httpx.Response, body: dict[str, Any]) -> Rollout:
    """The reply to ``body``. Raises RolloutServiceError if it does not fit together."""
    reply = parse(_Reply, response)
    prompt_token_ids = body.get("token_ids") if reply.prompt_token_ids is None else reply.prompt_token_ids
    num_asked = body["sampling_params"].get("n", 1)
    choices = sorted(reply.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(num_asked)) or prompt_token_ids is None:
        raise RolloutServiceError(
            f"reply {reply.request_id} has choices {[choice.index for choice in choices]} for n={num_asked} and "
            f"{'no ' if prompt_token_ids is None else ''}prompt_token_ids: not what was asked for"
        )
    try:
        completions = tuple(choice.completion() for choice in choices)
    except ValueError as error:
        raise RolloutServiceError(f"reply {reply.request_id} contradicts itself: {error}") from error
    return Rollout(
        request_id=reply.request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        completions=completions,
        replica_id=reply.replica_id,
        attempts=reply.attempts,
        truncated_sampling=reply.truncated_sampling,
    )


class _Choice(BaseModel):
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[FiniteFloat, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_versions: tuple[Span, ...]
    text: str | None = None
    packed_sampling_mask: tuple[str, ...] | None = None

    def completion(self) -> Completion:
        """As the noun. Raises ValueError if tokens, logprobs and spans do not match."""
        return Completion(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=self.weight_versions,
            text=self.text,
            packed_sampling_mask=self.packed_sampling_mask,
        )


class _Reply(BaseModel):
    request_id: str
    choices: list[_Choice]
    prompt_token_ids: tuple[int, ...] | None = None
    replica_id: str
    attempts: int = Field(default=1, ge=1)
    truncated_sampling: bool = False
