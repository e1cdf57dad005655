"""``POST /inference/v1/score``: logprobs of given tokens."""

import time
from collections.abc import Sequence
from itertools import pairwise

from fastapi import APIRouter

from rollout_service.errors import InvalidRequest, NotReady
from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.prompts import DATA_ERRORS, model_and_adapter, roll_out
from rollout_service.gateway.routes import PromptsRoute
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.scoring import ScoreReply, ScoreRequest
from rollout_service.web.errors import documented

router = APIRouter(tags=["score"], route_class=PromptsRoute)


@router.post(
    "/inference/v1/score", response_model=dict[str, object], responses={200: {"model": ScoreReply}, **DATA_ERRORS}
)
async def score(body: ScoreRequest, services: Here, x_session_id: SessionHeader = None) -> dict[str, object]:
    """Return the logprobs of given tokens, and of the most likely or of given tokens beside them."""
    model, adapter = await model_and_adapter(body.model, body.adapter, services)
    options = body.options(x_session_id).model_copy(update={"adapter": adapter})
    if body.target_token_ids is None:
        check_width("top_logprobs", body.top_logprobs, services)
    else:
        check_targets("target_token_ids", body.target_token_ids, body.start, services)
    # vLLM returns a prompt's logprobs with a first sampled token, which is dropped here
    sampling = Sampling(
        max_tokens=1,
        ignore_eos=True,
        top_k=int(services.returns_masks),
        prompt_logprobs=None if body.target_token_ids is not None else body.top_logprobs,
    )
    rollout = await roll_out(body.token_ids, sampling, services, options, scoring=body.scoring)
    [completion] = rollout.completions
    scores = completion.scores
    if scores is None:
        raise NotReady(f"{rollout.request_id} lost its replica after the scores were made: send it again")
    reply: dict[str, object] = {
        "request_id": rollout.request_id,
        "model": model,
        "created": int(time.time()),
        "replica_id": rollout.replica_id,
        "weight_version": str(completion.spans[0].version),
        "start": body.start,
    }
    if body.compact:
        return reply | {"compact_logprobs": scores.model_dump()}
    ids, logprobs = (entries.tolist() for entries in scores.unpacked())
    rows = list(pairwise(scores.offsets))
    return reply | {"token_ids": [ids[a:b] for a, b in rows], "logprobs": [logprobs[a:b] for a, b in rows]}


async def refuse(body: dict[str, object] | None = None) -> dict[str, object]:
    """Refuse the request of ms-swift, or of TRL before 1.11, to a teacher: not implemented."""
    raise InvalidRequest(
        "the routes of ms-swift's servers, and of TRL's before 1.11, are not implemented: POST /v1/completions with "
        "prompt_logprobs, or /inference/v1/score, has the logprobs of given tokens"
    )


for _route in ("/infer", "/get_sequence_logprobs"):
    router.post(_route, responses=documented(InvalidRequest))(refuse)


def check_width(name: str, width: int, services: Services) -> None:
    """Raise InvalidRequest for more logprobs of a token than the deployment returns. ``name``: of the request's
    field."""
    if width > services.max_logprobs:
        raise InvalidRequest(
            f"{name}: this deployment returns at most {services.max_logprobs} for a token: ask for fewer, or raise "
            "engine.max_logprobs",
            {"limit": services.max_logprobs},
        )


def check_targets(name: str, targets: Sequence[Sequence[int]], start: int, services: Services) -> None:
    """Raise InvalidRequest for too many target tokens, or for one outside the vocabulary."""
    check_width(name, max(map(len, targets), default=0), services)
    for position, tokens in enumerate(targets, start=start):
        outside = [token for token in tokens if not 0 <= token < services.vocab_size]
        if outside:
            raise InvalidRequest(
                f"target token id {outside[0]} of position {position} is outside the vocabulary "
                f"[0, {services.vocab_size}): send ids of this model's tokenizer",
                {"position": position, "token_id": outside[0]},
            )
