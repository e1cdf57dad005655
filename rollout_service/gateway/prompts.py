"""Check prompts and sampling parameters against the model's limits, and generate rollouts."""

import asyncio
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TypeVar

from rollout_service.errors import (
    ContextTooLong,
    EngineFailed,
    InvalidRequest,
    NonFiniteLogprob,
    NotFound,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
    VersionNotServed,
    shorten,
)
from rollout_service.fleet.continuation import sampling_of_the_rest
from rollout_service.fleet.progress import RolloutProgress
from rollout_service.gateway.dependencies import Services, answer_of_ingest
from rollout_service.metrics.process import counted_rollout
from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.base import FEW
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import MOST_COMPLETIONS, GenerateCall, Reasoning, Sampling, Scoring
from rollout_service.runtime.groups import groups_of
from rollout_service.runtime.tasks import raise_first_failure
from rollout_service.tracing import describe
from rollout_service.web.errors import documented

DATA_ERRORS = documented(
    *(ContextTooLong, EngineFailed, InvalidRequest, NonFiniteLogprob, NotFound, NotReady, Overloaded, TooEarly),
    VersionNotServed,
)
"""Error replies of a data route."""
BYTES_PER_TOKEN = 64
"""Maximum bytes of text per token of the context. Longer text is refused before tokenization, which takes seconds for
megabytes. Only a text of long runs of one character could be longer and still fit."""
MAX_PROMPT_LOGPROBS = 1 << 22
"""Maximum number of prompt logprobs in a reply. As JSON objects they are 200 MB, and a gateway answers nothing else for
seconds."""
_tokenizing = ThreadPoolExecutor(4, thread_name_prefix="tokenize")
_TOKENIZED_AT_ONCE = 64 << 10
"""Characters of texts that one thread tokenizes at once. A request with many long texts must neither keep the threads
from others nor outlive its client."""


async def model_and_adapter(model: str | None, adapter: str | None, services: Services) -> tuple[str, str | None]:
    """Return the model's name for the reply, and the adapter that the request names in either field.

    Raises NotFound for another model, and InvalidRequest for two adapters.
    """
    served = (services.name, *services.aliases)
    if model is None or model in served:
        return model or services.name, adapter
    if services.adapters is None or await services.adapters.find(model) is None:
        names = " and ".join(map(repr, served))
        instead = "use one of those" if services.aliases else "use that"
        raise NotFound(
            f"model {model[:256]!r} is not served here; {names} is: {instead}, or add it to model.aliases",
            {"served": list(served)},
        )
    if adapter not in (None, model):
        raise InvalidRequest(f"model={model!r} and adapter={adapter!r} are two adapters: send one")
    return model, model


async def find_adapter(options: RolloutOptions, services: Services) -> WantedAdapter | None:
    """Return the adapter that a request names, or None. Raises NotFound."""
    if options.adapter is None:
        return None
    found = None
    if services.adapters is not None:
        found = await services.adapters.find(options.adapter, options.min_adapter_version)
    if found is None:
        known = () if services.adapters is None else await services.adapters.names()
        raise NotFound(
            f"there is no adapter {options.adapter!r}; there are {list(known)}: push it", {"adapters": list(known)}
        )
    return found


async def tokenize(
    texts: Sequence[str], services: Services, add_special_tokens: bool | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each text. Runs in a thread, so that the gateway keeps answering.

    ``add_special_tokens``: see ``GenerateRequest``.

    Raises InvalidRequest if the model has no tokenizer, or if a text is longer than the context can hold.
    """
    tokenizer = services.tokenizer
    if tokenizer is None:
        raise InvalidRequest(f"{services.name} has no tokenizer: send token ids instead of text")
    limit = BYTES_PER_TOKEN * services.max_model_len
    sizes = [len(text.encode(errors="surrogatepass")) for text in texts]
    if too_long := [index for index, nbytes in enumerate(sizes) if nbytes > limit]:
        nbytes = sizes[too_long[0]]
        error = ContextTooLong(
            f"the prompt has {nbytes} bytes of text, and this model's maximum context length of "
            f"{services.max_model_len} tokens holds at most {limit}: shorten it, or send its token ids",
            {"prompt_bytes": nbytes, "limit_bytes": limit, "max_model_len": services.max_model_len},
        )
        raise of_prompt(error, too_long, len(texts))

    def encode(several: list[str]) -> list[tuple[int, ...]]:
        add = add_special_tokens is not False
        made = [tuple(tokenizer.encode(text, add_special_tokens=add)) for text in several]
        if add_special_tokens is not None:
            return made
        special = set(tokenizer.all_special_ids)
        added = [token for token in tokenizer.encode("") if token in special]
        return [_without_repeated_start(ids, added) for ids in made]

    made: list[tuple[int, ...]] = []
    for several in groups_of(texts, len, _TOKENIZED_AT_ONCE):
        made += await asyncio.get_running_loop().run_in_executor(_tokenizing, encode, several)
    return made


def _without_repeated_start(ids: tuple[int, ...], added: Sequence[int]) -> tuple[int, ...]:
    """Return ``ids`` without the tokens of ``added`` at their start if the text begins with the same tokens."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, added, strict=False)))
    return ids[count:] if ids[count : 2 * count] == ids[:count] else ids


def check_prompt(prompt: Sequence[int], sampling: Sampling, services: Services) -> None:
    """Raise InvalidRequest for a prompt or a length that the model cannot handle."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: send at least one token")
    _check_length(len(prompt), sampling, services.max_model_len)
    check_ids(prompt, services)
    for name, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias or ())):
        if outside := [token for token in tokens if not 0 <= token < services.vocab_size]:
            ids = shorten(str(outside))  # up to 300 numbers of up to 4300 digits
            raise InvalidRequest(f"{name} {ids} are outside the vocabulary [0, {services.vocab_size}): leave them out")
    if sampling.stop and services.tokenizer is None:
        raise InvalidRequest(f"{services.name} has no tokenizer: use stop_token_ids instead of stop")
    if sampling.structured_outputs is not None and services.tokenizer is None:
        raise InvalidRequest(f"{services.name} has no tokenizer, which structured_outputs need: leave them out")
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(sampling, name)
        if asked is not None and asked > services.max_logprobs:
            raise InvalidRequest(
                f"{name}={asked}: this deployment returns at most {services.max_logprobs} top logprobs: ask for "
                "fewer, or raise engine.max_logprobs",
                {name: asked, "limit": services.max_logprobs},
            )
    if services.returns_masks:
        _check_mask(sampling)


def check_ids(ids: Sequence[int], services: Services) -> None:
    """Raise InvalidRequest for the first token id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= services.vocab_size):
        position, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < services.vocab_size)
        raise InvalidRequest(
            f"token id {token} at position {position} is outside the vocabulary [0, {services.vocab_size}): send ids "
            "of this model's tokenizer",
            {"position": position, "token_id": token, "vocab_size": services.vocab_size},
        )


def check_prompts(prompts: Sequence[Sequence[int]], sampling: Sampling, services: Services) -> None:
    """Check all prompts of a request before sampling any. Raises the error of the first invalid prompt, with its index.

    ``detail["prompts"]`` has the indices of all invalid prompts, so that the caller can send the others at once.
    """
    first: InvalidRequest | None = None
    bad: list[int] = []
    for index, prompt in enumerate(prompts):
        try:
            check_prompt(prompt, sampling, services)
        except InvalidRequest as error:
            first = first or error
            bad.append(index)
    if first is not None:
        raise of_prompt(first, bad, len(prompts))
    _check_prompt_logprobs(sampling.n * sum(map(len, prompts)), sampling)


def _check_prompt_logprobs(tokens: int, sampling: Sampling) -> None:
    """Raise InvalidRequest if a reply would have too many prompt logprobs. ``tokens``: those that it lists."""
    if sampling.prompt_logprobs is None:
        return
    entries = tokens * (1 + sampling.prompt_logprobs)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs={sampling.prompt_logprobs}: {entries} logprobs are more than the {MAX_PROMPT_LOGPROBS} "
            "that fit a reply; send fewer prompts at once, or POST /inference/v1/score with compact: true",
            {"prompt_logprobs": entries, "limit": MAX_PROMPT_LOGPROBS},
        )


_Error = TypeVar("_Error", bound=RolloutServiceError)


def of_prompt(error: _Error, indices: Sequence[int], count: int) -> _Error:
    """Return ``error`` of prompt ``indices[0]`` of ``count``, with the indices of all failed prompts."""
    if count == 1:
        return error
    named = ", ".join(map(str, indices[1 : FEW + 1]))
    more = f" and {len(indices) - FEW - 1} more" if len(indices) > FEW + 1 else ""
    also = f" (prompts {named}{more} are refused, too)" if named else ""
    message = f"prompt {indices[0]} of {count}, counted from 0: {error.message}{also}"
    return type(error)(message, {**error.detail, "prompts": list(indices[:MOST_COMPLETIONS])})


async def read_prompts(
    given: str | Sequence[int | str | tuple[int, ...]],
    n: int,
    services: Services,
    add_special_tokens: bool | None = None,
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt of a request, which is one or several, as text or token ids.

    Raises InvalidRequest for more completions than one request may have.
    """
    prompts = (given,) if isinstance(given, str) else given
    ids = tuple(token for token in prompts if isinstance(token, int))
    if ids or not prompts:
        return [ids]
    if len(prompts) * n > MOST_COMPLETIONS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} completions, and one request may have "
            f"{MOST_COMPLETIONS}: send the prompts in several",
            {"prompts": len(prompts), "n": n, "limit": MOST_COMPLETIONS},
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return await tokenize(texts, services, add_special_tokens)
    return [prompt for prompt in prompts if isinstance(prompt, tuple)]


async def roll_out_all(
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    services: Services,
    options: RolloutOptions,
    names: Sequence[str | None],
) -> list[Rollout]:
    """Call ``roll_out`` for all prompts at once. Errors name the prompt's index. ``names``: their request ids."""

    async def roll_out_one(index: int) -> Rollout:
        try:
            named = options.model_copy(update={"request_id": names[index]})
            return await roll_out(prompts[index], sampling, services, named)
        except RolloutServiceError as error:
            raise of_prompt(error, [index], len(prompts)) from error

    async with raise_first_failure() as group:
        tasks = [group.create_task(roll_out_one(index)) for index in range(len(prompts))]
    return [task.result() for task in tasks]


def within_context(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> Sampling:
    """Return ``sampling`` with ``max_tokens`` limited to the rest of the context, as in vLLM."""
    left = max_model_len - prompt_tokens
    if sampling.max_tokens is not None and sampling.max_tokens <= left:
        return sampling
    return sampling.model_copy(update={"max_tokens": left})


def _check_length(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> None:
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} is above max_tokens={sampling.max_tokens}: lower it, or raise max_tokens"
        )
    if prompt_tokens >= max_model_len:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, which leave no room for a completion in this model's maximum "
            f"context length of {max_model_len} tokens: shorten the prompt",
            {"prompt_tokens": prompt_tokens, "max_model_len": max_model_len},
        )
    if prompt_tokens + sampling.min_tokens > max_model_len:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, and with min_tokens={sampling.min_tokens} that is more than this "
            f"model's maximum context length of {max_model_len} tokens: shorten one of them",
            {"prompt_tokens": prompt_tokens, "min_tokens": sampling.min_tokens, "max_model_len": max_model_len},
        )


def _check_mask(sampling: Sampling) -> None:
    """Raise InvalidRequest unless the request meets the conditions of vLLM's ``return_sampling_mask``."""
    needed = {"top_k": sampling.top_k >= 1, "temperature": sampling.temperature > 0}
    wrong = {name: getattr(sampling, name) for name, holds in needed.items() if not holds}
    if wrong:
        given = " and ".join(f"{name}={value}" for name, value in wrong.items())
        raise InvalidRequest(
            f"{given}: this deployment returns sampling masks (engine.return_sampling_mask), so every request needs "
            "top_k of at least 1, which bounds the mask, and a temperature above 0",
            {"parameters": wrong},
        )


def with_experts(prompt: Sequence[int], sampling: Sampling, services: Services, asked: bool) -> Sampling:
    """Return ``sampling`` with the first token whose experts are returned, or None to return none.

    Raises InvalidRequest if experts cannot be returned.
    """
    start = sampling.routed_experts_prompt_start
    if not services.returns_experts:
        if asked:
            raise InvalidRequest(
                "return_routed_experts is true, and this deployment's engines do not record the experts of tokens: "
                "leave it out, or set engine.return_routed_experts where a mixture of experts is served on a GPU"
            )
        return sampling.model_copy(update={"routed_experts_prompt_start": None})
    if start is not None and start > len(prompt):
        raise InvalidRequest(
            f"routed_experts_prompt_start={start} is beyond the prompt's {len(prompt)} tokens: lower it",
            {"routed_experts_prompt_start": start, "prompt_tokens": len(prompt)},
        )
    return sampling.model_copy(update={"routed_experts_prompt_start": 0 if asked and start is None else start})


def _from_partial(
    prompt: tuple[int, ...], partial: tuple[int, ...], sampling: Sampling, services: Services
) -> tuple[tuple[int, ...], Sampling]:
    """Return the prompt and the sampling parameters to continue from ``partial``. Raises InvalidRequest if not
    possible."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: send the tokens before partial_token_ids, at least one")
    if (why := services.dispatcher.why_restart(sampling)) is not None:
        raise InvalidRequest(f"partial_token_ids cannot continue a completion with {why}: leave out one of them")
    return prompt + partial, sampling_of_the_rest(sampling, 0, len(partial))


async def _number_of(version: int | str | None, services: Services) -> int | None:
    """Return the number of a version given by number or label. Raises NotFound for an unknown label, and NotReady."""
    return await answer_of_ingest(services.ingest.version_of(version)) if isinstance(version, str) else version


@counted_rollout
async def roll_out(
    prompt: tuple[int, ...],
    sampling: Sampling,
    services: Services,
    options: RolloutOptions = RolloutOptions(),  # noqa: B008  # frozen
    reasoning: Reasoning | None = None,
    progress: RolloutProgress | None = None,
    partial: tuple[int, ...] = (),
    scoring: Scoring | None = None,
) -> Rollout:
    """Check one prompt and complete it on an engine.

    Args:
        prompt, sampling, services, options, reasoning: the request.
        progress: receives the tokens during generation, for a streaming client.
        scoring: see ``GenerateCall``.
        partial: see ``GenerateRequest.partial_token_ids``. The rollout has these tokens at the end of its prompt.
    """
    if partial:
        prompt, sampling = _from_partial(prompt, partial, sampling, services)
    check_prompt(prompt, sampling, services)
    if scoring is None:
        _check_prompt_logprobs(len(prompt), sampling)
    sampling = with_experts(prompt, sampling, services, options.return_routed_experts)
    sampling = within_context(len(prompt), sampling, services.max_model_len)
    request = GenerateCall(
        request_id=options.request_id or uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling=sampling,
        partial_tokens=len(partial),
        min_weight_version=await _number_of(options.min_version, services),
        exact_weight_version=await _number_of(options.exact_version, services),
        adapter=await find_adapter(options, services),
        session_id=options.session_id,
        priority=options.priority,
        cache_salt=options.cache_salt,
        scoring=scoring,
        reasoning=reasoning if sampling.structured_outputs is not None else None,
    )
    try:
        rollout = await services.dispatcher.complete(request, options.on_abort, progress)
    except TooEarly as error:
        await find_adapter(options, services)  # it may have been removed meanwhile
        if options.weight_version is None:
            raise
        raise VersionNotServed(error.message, error.detail) from error
    if sampling.is_truncated:
        rollout = rollout.model_copy(update={"truncated_sampling": True})
    describe(rollout)
    return rollout
