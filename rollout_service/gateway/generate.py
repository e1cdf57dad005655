"""``POST /inference/v1/generate``: tokens in, tokens out, as vLLM's clients expect it."""

import time
from typing import Any

from fastapi import APIRouter

from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.prompts import DATA_ERRORS, check_model, detokenize, roll_out, tokenize
from rollout_service.gateway.routes import OpenRoute
from rollout_service.protocol.generate import GenerateReply, GenerateRequest
from rollout_service.protocol.rollout import Completion, Rollout

router = APIRouter(tags=["generate"], route_class=OpenRoute)


@router.post("/inference/v1/generate", responses={200: {"model": GenerateReply}, **DATA_ERRORS})
async def generate(body: GenerateRequest, services: Here, x_session_id: SessionHeader = None) -> dict[str, Any]:
    """The completions of one prompt, with the logprob and the weight version of every token."""
    check_model(body.model, services)
    prompt = body.token_ids or ()
    if body.prompt is not None:
        [prompt] = await tokenize([body.prompt], services)
    rollout = await roll_out(prompt, body.sampling_params, services, body.options(x_session_id))
    reply: dict[str, Any] = {
        "request_id": rollout.request_id,
        "model": services.name,
        "created": int(time.time()),
        "output_mode": body.output_mode,
        "choices": [_choice(c, services, body) for c in rollout.completions],
        "usage": usage([rollout]),
        "replica_id": rollout.replica_id,
        "attempts": rollout.attempts,
        "truncated_sampling": rollout.truncated_sampling,
    }
    if body.return_token_ids or body.prompt is not None:
        reply["prompt_token_ids"] = rollout.prompt_token_ids
    return reply


def _choice(completion: Completion, services: Services, body: GenerateRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs if body.flat_logprobs else {"content": _by_token(completion)},
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": spans(completion),
    }
    if body.output_mode == "text":
        choice["text"] = detokenize(completion.token_ids, services)
    return choice | packed_mask(completion)


def _by_token(completion: Completion) -> list[dict[str, int | float]]:
    """vLLM's form of the logprobs."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [{"token_id": token, "logprob": logprob} for token, logprob in pairs]


def spans(completion: Completion) -> list[dict[str, Any]]:
    """vLLM's form of the spans, whose versions are strings, and the replica of each."""
    return [
        {"version": str(s.version), "start": s.start, "end": s.end, "replica_id": s.replica_id}
        for s in completion.spans
    ]


def packed_mask(completion: Completion) -> dict[str, Any]:
    """The sampling mask's chunks, where the deployment returns them. vLLM's own form is several times as long."""
    mask = completion.packed_sampling_mask
    return {} if mask is None else {"packed_sampling_mask": mask}


def usage(rollouts: list[Rollout]) -> dict[str, int]:
    """Token counts of a reply."""
    prompt = sum(len(rollout.prompt_token_ids) for rollout in rollouts)
    completion = sum(len(c.token_ids) for rollout in rollouts for c in rollout.completions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
