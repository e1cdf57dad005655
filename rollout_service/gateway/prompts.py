"""From what a request says to what an engine can do, or a clear no."""

import asyncio
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import Field, StrictInt, model_validator

from rollout_service.errors import (
    EngineFailed,
    InvalidRequest,
    NonFiniteLogprob,
    NotFound,
    NotReady,
    Overloaded,
    TooEarly,
)
from rollout_service.gateway.dependencies import Services
from rollout_service.metrics.process import counted_rollout
from rollout_service.protocol.base import Frozen, WeightVersion
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling, refuse_many_unknown
from rollout_service.web.errors import documented

DATA_ERRORS = documented(EngineFailed, InvalidRequest, NonFiniteLogprob, NotFound, NotReady, Overloaded, TooEarly)
"""Of a data route."""
TokenIds = Annotated[tuple[StrictInt, ...], Field(fail_fast=True)]
"""Fails at the first that is none: a body has room for millions, and pydantic would make an error of each."""
ModelName = Annotated[str, Field(max_length=1024)]
BYTES_PER_TOKEN = 64
"""Text with more than this for each token of the context is refused before it is tokenized, which takes seconds for
megabytes. Only a prompt of almost nothing but runs of one character could be longer and fit."""
_tokenizing = ThreadPoolExecutor(4, thread_name_prefix="tokenize")


class RolloutOptions(Frozen):
    """What a request of either data route may say about where and when it is answered."""

    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    """The rollout's name in logs."""
    min_weight_version: WeightVersion | None = None
    """Only weights at least this new may answer; they are waited for ``engine.version_wait_s``, then 425."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Requests of one session go to one replica while it lives. Or as header ``X-Session-Id``."""
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    """vLLM's: a lower one is scheduled earlier."""
    on_abort: OnAbort = "continue"
    """``return``: a completion that an update, a pause or a lost replica cuts short comes back as it is, with
    ``finish_reason="abort"``, instead of going on elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _few_names_are_unknown(cls, data: Any) -> Any:
        return refuse_many_unknown(cls.model_fields, data)

    def options(self, session_header: str | None) -> "RolloutOptions":
        """These fields alone, the session from wherever it was named. Raises InvalidRequest for two sessions."""
        if session_header and self.session_id and session_header != self.session_id:
            raise InvalidRequest(
                f"session_id={self.session_id!r} and the header X-Session-Id: {session_header!r} differ: send one"
            )
        fields = {name: getattr(self, name) for name in RolloutOptions.model_fields}
        return RolloutOptions(**{**fields, "session_id": self.session_id or session_header or None})


def check_model(name: str | None, services: Services) -> None:
    """Raise NotFound if a request names another model than the served one."""
    if name is not None and name != services.name:
        raise NotFound(f"model {name!r} is not served here; {services.name!r} is", {"served": services.name})


async def tokenize(texts: Sequence[str], services: Services, add_special_tokens: bool = True) -> list[tuple[int, ...]]:
    """Token ids of each text, made in a thread: meanwhile this gateway answers other requests.

    Raises InvalidRequest if the model has no tokenizer, or a text is longer than its context can hold.
    """
    tokenizer = services.tokenizer
    if tokenizer is None:
        raise InvalidRequest(f"{services.name} has no tokenizer: send token ids instead of text")
    limit = BYTES_PER_TOKEN * services.max_model_len
    for text in texts:
        nbytes = len(text.encode(errors="surrogatepass"))
        if nbytes > limit:
            raise InvalidRequest(
                f"the prompt has {nbytes} bytes of text, and the context of {services.max_model_len} tokens holds at "
                f"most {limit}: shorten it, or send its token ids",
                {"prompt_bytes": nbytes, "limit_bytes": limit, "max_model_len": services.max_model_len},
            )

    def encode() -> list[tuple[int, ...]]:
        return [tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    return await asyncio.get_running_loop().run_in_executor(_tokenizing, encode)


def detokenize(token_ids: Sequence[int], services: Services, skip_special_tokens: bool = True) -> str | None:
    """Text of ``token_ids``, or None if the model has no tokenizer."""
    if services.tokenizer is None:
        return None
    text: str = services.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    return text


def check_prompt(prompt: Sequence[int], sampling: Sampling, services: Services) -> None:
    """Raise InvalidRequest for a prompt or a length that the model cannot take."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: send at least one token")
    _check_length(len(prompt), sampling, services.max_model_len)
    outside = next(((i, t) for i, t in enumerate(prompt) if not 0 <= t < services.vocab_size), None)
    if outside is not None:
        position, token = outside
        raise InvalidRequest(
            f"token id {token} at position {position} is outside the vocabulary [0, {services.vocab_size})",
            {"position": position, "token_id": token, "vocab_size": services.vocab_size},
        )
    outside_stop = [t for t in sampling.stop_token_ids if not 0 <= t < services.vocab_size]
    if outside_stop:
        raise InvalidRequest(f"stop_token_ids {outside_stop} are outside the vocabulary [0, {services.vocab_size})")
    if sampling.stop and services.tokenizer is None:
        raise InvalidRequest(f"{services.name} has no tokenizer: use stop_token_ids instead of stop")
    if services.returns_masks:
        _check_mask(sampling)


def _check_length(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> None:
    wanted = prompt_tokens + (sampling.max_tokens or 1)
    if wanted > max_model_len:
        asked = "at least 1" if sampling.max_tokens is None else f"max_tokens={sampling.max_tokens}"
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens, and with {asked} that is more than the context of "
            f"{max_model_len}: shorten one of them",
            {"prompt_tokens": prompt_tokens, "max_tokens": sampling.max_tokens, "max_model_len": max_model_len},
        )
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(f"min_tokens={sampling.min_tokens} is above max_tokens={sampling.max_tokens}")
    if prompt_tokens + sampling.min_tokens > max_model_len:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens, and with min_tokens={sampling.min_tokens} that is more than the "
            f"context of {max_model_len}: shorten one of them",
            {"prompt_tokens": prompt_tokens, "min_tokens": sampling.min_tokens, "max_model_len": max_model_len},
        )


def _check_mask(sampling: Sampling) -> None:
    """What vLLM's ``return_sampling_mask``, which holds for every request of an engine, asks of each."""
    needed = {"top_k": sampling.top_k >= 1, "temperature": sampling.temperature > 0}
    wrong = {name: getattr(sampling, name) for name, holds in needed.items() if not holds}
    if wrong:
        given = " and ".join(f"{name}={value}" for name, value in wrong.items())
        raise InvalidRequest(
            f"{given}: this deployment returns sampling masks (engine.return_sampling_mask), so every request needs "
            "top_k of at least 1, which bounds the mask, and a temperature above 0",
            {"parameters": wrong},
        )


@counted_rollout
async def roll_out(
    prompt: tuple[int, ...],
    sampling: Sampling,
    services: Services,
    options: RolloutOptions = RolloutOptions(),  # noqa: B008  # frozen
) -> Rollout:
    """Check one prompt and have an engine complete it."""
    check_prompt(prompt, sampling, services)
    if sampling.max_tokens is None:
        sampling = sampling.model_copy(update={"max_tokens": services.max_model_len - len(prompt)})
    request = GenerateCall(
        request_id=options.request_id or uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling=sampling,
        min_weight_version=options.min_weight_version,
        session_id=options.session_id,
        priority=options.priority,
    )
    rollout = await services.dispatcher.complete(request, options.on_abort)
    if sampling.is_truncated:
        rollout = rollout.model_copy(update={"truncated_sampling": True})
    services.feed.note(rollout)
    services.shadow.note(rollout, sampling)
    return rollout
