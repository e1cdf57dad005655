"""``POST /inference/v1/generate``: vLLM's token-in, token-out API."""

import itertools
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import numpy as np
from fastapi import APIRouter, Response

from rollout_service.errors import NotReady
from rollout_service.fleet.progress import CompletionDelta
from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.prompts import DATA_ERRORS, model_and_adapter, roll_out, tokenize
from rollout_service.gateway.routes import PromptsRoute
from rollout_service.gateway.streams import EVENT_STREAM, Spans, TextStream, event_stream, live_pieces, text_of
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.generate import GenerateReply, GenerateRequest, RolloutOptions, StreamOptions
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.routed_experts import RoutedExperts

router = APIRouter(tags=["generate"], route_class=PromptsRoute)


class SkyrlGenerate(GenerateRequest):
    """The request of SkyRL 0.4.0 (``inference_servers/remote_inference_client.py``) for routing replay."""

    return_routed_experts: Literal[True] = True


@router.post(
    "/inference/v1/generate",
    response_model=dict[str, object],
    responses={200: {"model": GenerateReply, **EVENT_STREAM}, **DATA_ERRORS},
)
async def generate(
    body: GenerateRequest, services: Here, x_session_id: SessionHeader = None
) -> dict[str, object] | Response:
    """Complete one prompt. The reply has the logprob and the weight version of every token."""
    model, adapter = await model_and_adapter(body.model, body.adapter, services)
    prompt = body.token_ids or ()
    if body.prompt is not None:
        [prompt] = await tokenize([body.prompt], services, body.add_special_tokens)
    options = body.options(x_session_id).model_copy(update={"adapter": adapter})
    if body.stream:
        return await event_stream(_chunks(prompt, body, services, options))
    return await _reply(prompt, body, services, options, model)


@router.post(
    "/skyrl/v1/generate", response_model=dict[str, object], responses={200: {"model": GenerateReply}, **DATA_ERRORS}
)
async def generate_with_experts(
    body: SkyrlGenerate, services: Here, x_session_id: SessionHeader = None
) -> dict[str, object] | Response:
    """Complete one prompt and return the routed experts of its tokens, as SkyRL replays them."""
    return await generate(body, services, x_session_id)


async def _reply(
    prompt: tuple[int, ...], body: GenerateRequest, services: Services, options: RolloutOptions, model: str
) -> dict[str, object]:
    rollout = await roll_out(prompt, body.sampling_params, services, options, partial=body.partial_token_ids)
    reply: dict[str, object] = {
        "request_id": rollout.request_id,
        "model": model,
        "created": int(time.time()),
        "output_mode": body.output_mode,
        "choices": [_whole_choice(prompt, c, services, body) for c in rollout.completions],
        "usage": usage([rollout]),
        "replica_id": rollout.replica_id,
        "attempts": rollout.attempts,
        "truncated_sampling": rollout.truncated_sampling,
    }
    if body.return_token_ids or body.prompt is not None:
        reply["prompt_token_ids"] = prompt
    if body.sampling_params.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(rollout)
    return reply


async def _chunks(
    prompt: tuple[int, ...], body: GenerateRequest, services: Services, options: RolloutOptions
) -> AsyncGenerator[dict[str, object]]:
    """Yield the events of a stream, see ``GenerateChunk``."""
    options = options.model_copy(update={"request_id": options.request_id or uuid.uuid4().hex})
    wanted, common = body.stream_options or StreamOptions(), dict[str, object]()
    common |= {"request_id": options.request_id, "output_mode": body.output_mode}
    sampling = body.sampling_params
    texts: dict[int, TextStream] = {}
    gathered = [Spans() for _ in range(sampling.n)]
    of_the_prompt: dict[str, object] = {}
    if body.return_token_ids or body.prompt is not None:
        of_the_prompt["prompt_token_ids"] = prompt
    partial = body.partial_token_ids
    async with aclosing(live_pieces(prompt, sampling, services, options, partial=partial)) as pieces:
        async for piece in pieces:
            if isinstance(piece, CompletionDelta):
                made = gathered[piece.made.index].of(piece)
                choice = _choice(made, body) | {"finish_reason": made.finish_reason if piece.is_last else None}
                if body.output_mode == "text":
                    if made.index not in texts:  # not earlier: the prompt's ids are checked by now
                        texts[made.index] = TextStream(prompt, sampling, services.tokenizer, partial)
                    choice["text"] = texts[made.index].add(made, piece.is_last)
                chunk = common | of_the_prompt | {"choices": [choice]}
                if wanted.continuous_usage_stats:
                    chunk["usage"] = token_counts(len(prompt) + len(partial), piece.start + len(made.token_ids))
                of_the_prompt = {}
                yield chunk
            elif wanted.include_usage:
                yield common | {
                    "choices": [],
                    "usage": usage([piece]),
                    "replica_id": piece.replica_id,
                    "attempts": piece.attempts,
                    "truncated_sampling": piece.truncated_sampling,
                }


def _choice(completion: Completion, body: GenerateRequest) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "logprobs": _logprobs(completion, body),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": spans(completion),
    }
    if body.compact_logprobs:
        choice["compact_logprobs"] = _compact_logprobs(completion, body.sampling_params.logprobs or 0).model_dump()
    elif body.flat_logprobs and completion.top_logprobs is not None:
        choice["top_logprobs"] = completion.top_logprobs
    experts = skyrl_experts if isinstance(body, SkyrlGenerate) else routed_experts
    return choice | packed_mask(completion) | experts(completion)


def _logprobs(completion: Completion, body: GenerateRequest) -> object:
    if body.compact_logprobs:
        return None
    return completion.logprobs if body.flat_logprobs else {"content": _by_token(completion)}


def _whole_choice(
    prompt: tuple[int, ...], completion: Completion, services: Services, body: GenerateRequest
) -> dict[str, object]:
    if body.output_mode == "tokens":
        return _choice(completion, body)
    whole = completion.model_copy(update={"token_ids": body.partial_token_ids + completion.token_ids})
    return _choice(completion, body) | {"text": text_of(whole, body.sampling_params, services, prompt)}


def _compact_logprobs(completion: Completion, num_top: int) -> CompactLogprobs:
    rows = candidates(completion)
    entries = [entry for row in rows for entry in row]
    offsets = list(itertools.accumulate(map(len, rows), initial=0))
    return CompactLogprobs.of([e.token_id for e in entries], [e.logprob for e in entries], offsets, num_top)


def _by_token(completion: Completion) -> list[dict[str, object]]:
    """Return logprobs that clients of vLLM 0.32 and of older versions can read.

    renderers 0.1.12 reads ``token``, vLLM 0.32 reads ``token_id``.
    """
    rows = candidates(completion) if completion.top_logprobs else ((),) * len(completion.token_ids)
    return [
        {
            "token_id": token,
            "token": f"token_id:{token}",
            "logprob": logprob,
            "top_logprobs": [
                {"token_id": c.token_id, "token": f"token_id:{c.token_id}", "logprob": c.logprob, "rank": c.rank}
                for c in row
            ],
        }
        for token, logprob, row in zip(completion.token_ids, completion.logprobs, rows, strict=True)
    ]


def candidates(completion: Completion) -> list[list[Candidate]]:
    """Return the candidates of each token in vLLM's order: the sampled token, then the top tokens. Rank 0: the sampled
    token is not among them."""
    likeliest = completion.top_logprobs or ((),) * len(completion.token_ids)
    return [_sampled_first(*each) for each in zip(completion.token_ids, completion.logprobs, likeliest, strict=True)]


def _sampled_first(token: int, logprob: float, likeliest: tuple[Candidate, ...]) -> list[Candidate]:
    rank = next((each.rank for each in likeliest if each.token_id == token), 0)
    return [Candidate(token, logprob, rank), *(each for each in likeliest if each.token_id != token)]


def prompt_logprobs(rollout: Rollout) -> list[dict[str, dict[str, float]] | None]:
    """Return prompt logprobs in vLLM's format."""
    return [
        None if row is None else {str(c.token_id): {"logprob": c.logprob, "rank": c.rank} for c in row}
        for row in rollout.completions[0].prompt_logprobs or ()
    ]


def spans(completion: Completion) -> list[dict[str, object]]:
    """Return the spans in vLLM's format, with versions as strings. Adds each span's replica, and its label,
    ``kv_from`` and adapter if it has them."""
    return [
        {"version": str(s.version), "start": s.start, "end": s.end, "replica_id": s.replica_id}
        | ({} if s.label is None else {"label": s.label})
        | ({} if s.kv_from is None else {"kv_from": str(s.kv_from)})
        | ({} if s.adapter is None else {"adapter": s.adapter, "adapter_version": s.adapter_version})
        for s in completion.spans
    ]


def packed_mask(completion: Completion) -> dict[str, object]:
    """Return the field with the packed sampling mask, if the engine returns masks. vLLM's own format is several times
    larger."""
    mask = completion.packed_sampling_mask
    return {} if mask is None else {"packed_sampling_mask": mask}


def routed_experts(completion: Completion) -> dict[str, object]:
    """Return the field with the routed experts, if they were requested."""
    experts = completion.routed_experts
    return {} if experts is None else {"routed_experts": experts.model_dump()}


def require_known(experts: RoutedExperts) -> RoutedExperts:
    """Return ``experts``. Raises NotReady if rows are missing, for a client that would replay their zeros."""
    if experts.missing:
        raise NotReady("the experts of the completion's tokens were lost with their replica: send the request again")
    return experts


def skyrl_experts(completion: Completion) -> dict[str, object]:
    """Return the field as SkyRL reads it: all rows are known, and have the smallest of its types.

    Raises NotReady if rows are unknown.
    """
    experts = completion.routed_experts
    if experts is None or require_known(experts).dtype == "uint8":
        return routed_experts(completion)
    rows = experts.rows()
    if rows.max(initial=0) < 1 << 8:
        return {"routed_experts": RoutedExperts.of(rows.astype(np.uint8), experts.start).model_dump()}
    return {"routed_experts": experts.model_dump() | {"dtype": "int16"}}  # the same bytes: there are fewer than 2**15


def usage(rollouts: list[Rollout]) -> dict[str, object]:
    """Return OpenAI's ``usage`` object for a reply."""
    prompt = sum(len(rollout.prompt_token_ids) for rollout in rollouts)
    completion = sum(len(c.token_ids) for rollout in rollouts for c in rollout.completions)
    cached = sum(rollout.cached_tokens for rollout in rollouts)
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}
    return {**token_counts(prompt, completion), **details}


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    """Return OpenAI's ``usage`` object for these token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
