"""``POST /inference/v1/score``: logprobs of given tokens, as a distillation's teacher gives them."""

from typing import Annotated, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from rollout_service.protocol.base import refuse_bool
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.generate import ModelName, RolloutOptions, TokenIds
from rollout_service.protocol.sampling import Scoring

MAX_JSON_ENTRIES = 1 << 20
"""Maximum number of logprobs in a reply without ``compact``, which takes seconds to write and to parse beyond it."""


class ScoreRequest(RolloutOptions):
    """Tokens to score, and the fields of ``RolloutOptions`` but ``on_abort`` and ``return_routed_experts``."""

    token_ids: TokenIds
    """Prompt and completion together."""
    start: int = Field(default=1, ge=1)
    """First token that is scored. vLLM computes the logprobs of earlier tokens, too, unless there are
    ``target_token_ids``."""
    top_logprobs: int = Field(default=0, ge=0)
    """Number of most likely tokens returned for each position after the token itself, at most
    ``engine.max_logprobs``."""
    target_token_ids: Annotated[tuple[TokenIds, ...], Field(fail_fast=True)] | None = None
    """Tokens whose logprobs are returned instead, for each token from ``start`` on; at most ``engine.max_logprobs`` for
    one. Needs a GPU."""
    compact: bool = False
    """Return ``compact_logprobs`` instead of lists."""
    model: ModelName | None = None
    """A name of the served model. None: any."""

    _no_booleans = field_validator("start", "top_logprobs", "priority", mode="before")(refuse_bool)

    @model_validator(mode="after")
    def _scores(self) -> Self:
        if self.on_abort != "continue" or self.return_routed_experts:
            raise ValueError("a score has no partial result and no routed experts: leave both options out")
        if self.target_token_ids is not None and self.top_logprobs:
            raise ValueError("top_logprobs and target_token_ids are given: send one of them")
        if self.start >= len(self.token_ids):
            raise ValueError(
                f"start={self.start}, and there are {len(self.token_ids)} tokens: none is scored; lower it"
            )
        rows = len(self.token_ids) - self.start
        if self.target_token_ids is not None and len(self.target_token_ids) != rows:
            raise ValueError(
                f"target_token_ids has {len(self.target_token_ids)} lists, and {rows} tokens are scored from "
                f"start={self.start} on: send a list for each"
            )
        entries = rows * self.width
        if not self.compact and entries > MAX_JSON_ENTRIES:
            raise ValueError(
                f"{entries} logprobs are more than the {MAX_JSON_ENTRIES} that fit JSON: set compact to true"
            )
        return self

    @property
    def width(self) -> int:
        """Return the maximum number of entries of a position."""
        targets = self.target_token_ids
        return 1 + self.top_logprobs if targets is None else max(map(len, targets), default=0)

    @property
    def scoring(self) -> Scoring:
        """Return what an engine needs to know."""
        return Scoring(start=self.start, target_token_ids=self.target_token_ids)


class ScoreReply(BaseModel):
    """Logprobs at temperature 1, without truncation."""

    request_id: str
    model: str
    created: int
    replica_id: str
    weight_version: str
    """The version that scored all tokens."""
    start: int
    token_ids: list[list[int]] | None = None
    """For each scored token its own id and the most likely tokens, or its target tokens; None with ``compact``."""
    logprobs: list[list[float]] | None = None
    """Natural logarithms, in the order of ``token_ids``."""
    compact_logprobs: CompactLogprobs | None = None
