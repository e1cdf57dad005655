"""``POST /inference/v1/score``: logprobs of given tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rollout_service.client._generate import RequestOptions, token_ids_of
from rollout_service.client._http import parse
from rollout_service.errors import InvalidRequest, RolloutServiceError
from rollout_service.protocol.scoring import ScoreReply, ScoreRequest


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
    try:
        return ScoreRequest.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(f"a score is refused: {error.errors(include_url=False)[0]['msg']}") from error


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
