"""``POST /inference/v1/generate``: tokens in, tokens out, as vLLM's clients expect it."""

import time

from fastapi import APIRouter

from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.prompts import DATA_ERRORS, model_name, roll_out, text_of, tokenize
from rollout_service.gateway.routes import OpenRoute
from rollout_service.protocol.generate import GenerateReply, GenerateRequest
from rollout_service.protocol.rollout import Candidate, Completion, Rollout

router = APIRouter(tags=["generate"], route_class=OpenRoute)


@router.post("/inference/v1/generate", responses={200: {"model": GenerateReply}, **DATA_ERRORS})
async def generate(body: GenerateRequest, services: Here, x_session_id: SessionHeader = None) -> dict[str, object]:
    """The completions of one prompt, with the logprob and the weight version of every token."""
    model = model_name(body.model, services)
    prompt = body.token_ids or ()
    if body.prompt is not None:
        [prompt] = await tokenize([body.prompt], services)
    rollout = await roll_out(prompt, body.sampling_params, services, body.options(x_session_id))
    reply: dict[str, object] = {
        "request_id": rollout.request_id,
        "model": model,
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
    if body.sampling_params.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(rollout)
    return reply


def _choice(completion: Completion, services: Services, body: GenerateRequest) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs if body.flat_logprobs else {"content": _by_token(completion)},
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": spans(completion),
    }
    if body.output_mode == "text":
        choice["text"] = text_of(completion, body.sampling_params, services)
    if body.flat_logprobs and completion.top_logprobs is not None:
        choice["top_logprobs"] = completion.top_logprobs
    return choice | packed_mask(completion) | routed_experts(completion)


def _by_token(completion: Completion) -> list[dict[str, object]]:
    """vLLM's form of the logprobs, and the one that it had before 0.32, in one: clients of both are in use.

    Read with renderers 0.1.12 (``token``) and vLLM 0.32 (``token_id``).
    """
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    likeliest = completion.top_logprobs or ()
    return [
        {
            "token_id": token,
            "token": f"token_id:{token}",
            "logprob": logprob,
            "top_logprobs": [
                {"token_id": c.token_id, "token": f"token_id:{c.token_id}", "logprob": c.logprob, "rank": c.rank}
                for c in (sampled_first(token, logprob, likeliest[at]) if at < len(likeliest) else ())
            ],
        }
        for at, (token, logprob) in enumerate(pairs)
    ]


def sampled_first(token: int, logprob: float, likeliest: tuple[Candidate, ...]) -> list[Candidate]:
    """vLLM's order: the sampled token, then the likeliest others. It has the rank 0 if it is not among them."""
    rank = next((each.rank for each in likeliest if each.token_id == token), 0)
    return [Candidate(token, logprob, rank), *(each for each in likeliest if each.token_id != token)]


def prompt_logprobs(rollout: Rollout) -> list[dict[str, dict[str, float]] | None]:
    """vLLM's form of what is known of the prompt's tokens."""
    return [
        None if candidates is None else {str(c.token_id): {"logprob": c.logprob, "rank": c.rank} for c in candidates}
        for candidates in rollout.completions[0].prompt_logprobs or ()
    ]


def spans(completion: Completion) -> list[dict[str, object]]:
    """vLLM's form of the spans, whose versions are strings, with the replica of each, and the label if it has one."""
    return [
        {"version": str(s.version), "start": s.start, "end": s.end, "replica_id": s.replica_id}
        | ({} if s.label is None else {"label": s.label})
        for s in completion.spans
    ]


def packed_mask(completion: Completion) -> dict[str, object]:
    """The sampling mask's chunks, where the deployment returns them. vLLM's own form is several times as long."""
    mask = completion.packed_sampling_mask
    return {} if mask is None else {"packed_sampling_mask": mask}


def routed_experts(completion: Completion) -> dict[str, object]:
    """Which experts its tokens went to, if they were asked for."""
    experts = completion.routed_experts
    return {} if experts is None else {"routed_experts": experts.model_dump()}


def usage(rollouts: list[Rollout]) -> dict[str, int]:
    """Token counts of a reply."""
    prompt = sum(len(rollout.prompt_token_ids) for rollout in rollouts)
    completion = sum(len(c.token_ids) for rollout in rollouts for c in rollout.completions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
