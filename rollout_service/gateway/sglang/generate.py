"""``POST /generate``: SGLang's generation API. It returns tokens, logprobs and their weight version."""

import base64
import time
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Header
from pydantic import Field, ValidationError, model_validator

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.generate import require_known, spans
from rollout_service.gateway.prompts import DATA_ERRORS, check_prompts, read_prompts, roll_out_all
from rollout_service.gateway.sglang.replies import DataRoute
from rollout_service.gateway.streams import text_of
from rollout_service.protocol.base import FEW, Frozen
from rollout_service.protocol.generate import RolloutOptions, TokenIds, WantedVersion
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sampling import (
    MOST_COMPLETIONS,
    Finite,
    Sampling,
    StopString,
    StopStrings,
    StopTokens,
    without_idle_nulls,
)

router = APIRouter(tags=["sglang"], route_class=DataRoute)

RequestId = Annotated[str, Field(min_length=1, max_length=256)]
_OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""SGLang's names of sampling parameters, with this service's."""
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
RoutingKey = Annotated[str | None, Header(alias="X-SMG-Routing-Key", max_length=256)]
"""Header in which slime sends the session id."""


class SamplingParams(Frozen):
    """SGLang's sampling parameters with its defaults. Unknown ones are refused by name."""

    n: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    max_new_tokens: int | None = Field(default=128, ge=0)
    """None: the rest of the context. 0: only logprobs of the prompt, which need ``logprob_start_len``."""
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: Finite = 0.0
    repetition_penalty: Finite = 1.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    stop: StopStrings | StopString | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    """True to keep the stop string, the stop token or the end of sequence at the end of the text."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle_nulls(cls, data: object) -> object:
        return without_idle_nulls(cls, data)

    def sampling(self) -> Sampling:
        """Return the parameters under this service's names. Raises ValueError for a value that ``Sampling`` refuses."""
        fields = {_OURS.get(name, name): getattr(self, name) for name in SamplingParams.model_fields}
        if self.max_new_tokens == 0:  # vLLM returns a prompt's logprobs with a first sampled token, which is dropped
            fields["max_tokens"] = 1
        return Sampling(**{**fields, "stop": self.stop or (), "stop_token_ids": self.stop_token_ids or ()})

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        try:
            self.sampling()
        except ValidationError as error:
            problems = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()[:FEW]]
            raise ValueError("; ".join(f"{_THEIRS.get(name, name)} {problem}" for name, problem in problems)) from error
        return self


class SglangGenerate(Frozen):
    """One prompt or several. Unknown fields are refused by name."""

    input_ids: TokenIds | Annotated[tuple[TokenIds, ...], Field(fail_fast=True)] | None = None
    text: str | Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    sampling_params: SamplingParams = SamplingParams()
    """Sampling parameters for all prompts. A list with one entry per prompt is refused."""
    return_logprob: bool = False
    logprob_start_len: int | None = Field(default=None, ge=-1)
    """With ``return_logprob``, the first token of the prompt whose logprob is in ``input_token_logprobs``, as trainers
    ask their teachers. None or -1: no token. The prompt's first token has no logprob."""
    top_logprobs_num: Literal[0] | None = None
    return_text_in_logprobs: Literal[False] | None = None
    return_routed_experts: bool | None = None
    """Return ``routed_experts``: base64 of int32 [tokens, layers, topk], for all tokens but the last."""
    return_indexer_topk: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None
    return_bytes: Literal[False] | None = None
    return_entropy: Literal[False] | None = None
    image_data: Annotated[tuple[str, ...], Field(max_length=0)] | None = None
    """Only empty, as AReaL sends it with text."""
    background: Literal[False] | None = None
    stream: Literal[False] | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    """Statistics and logging options of SGLang's server; ignored here. sglang-router 0.3.2 sends both with every
    request."""
    rid: RequestId | None = None
    """The rollout's name in logs. With several prompts, the prompt's index is appended."""
    lora_path: str | None = Field(default=None, min_length=1, max_length=160)
    """The name of an adapter, for all prompts: see ``RolloutOptions.adapter``."""
    extra_key: str | None = Field(default=None, min_length=1, max_length=1024)
    """See ``RolloutOptions.cache_salt``."""
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    weight_version: WantedVersion | None = None
    """The version that may answer: not SGLang's field, but that of miles and Stitch."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle_nulls(cls, data: object) -> object:
        return without_idle_nulls(cls, data)

    @model_validator(mode="after")
    def _ids_or_text(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give either input_ids or text")
        return self

    @model_validator(mode="after")
    def _returns_something(self) -> Self:
        if self.sampling_params.max_new_tokens == 0 and self.first_scored is None:
            raise ValueError(
                "sampling_params.max_new_tokens=0 returns only logprobs of the prompt: set return_logprob and "
                "logprob_start_len, or raise it"
            )
        return self

    @property
    def first_scored(self) -> int | None:
        """The first token of the prompt whose logprob is returned. None: no token's."""
        return self.logprob_start_len if self.return_logprob and self.logprob_start_len != -1 else None

    @property
    def is_batch(self) -> bool:
        """True if the reply is a list for any ``n``."""
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, tuple) and not (given and isinstance(given[0], int))


class SglangChoice(Frozen):
    """Schema of a completion, for the documentation. The reply is built without it."""

    text: str
    output_ids: tuple[int, ...]
    meta_info: dict[str, object]


@router.post("/generate", responses={200: {"model": SglangChoice | list[SglangChoice]}, **DATA_ERRORS})
async def generate(body: SglangGenerate, services: Here, routing_key: RoutingKey = None) -> object:
    """Return a completion, or a list for several prompts or ``n > 1``, in the order of the prompts.

    A completion interrupted by an update, a pause or a lost replica is returned with the finish reason "abort".
    """
    began = time.monotonic()
    sampling, given = body.sampling_params.sampling(), body.input_ids if body.text is None else body.text
    if body.first_scored is not None:
        sampling = sampling.model_copy(update={"prompt_logprobs": 0})
    prompts = await read_prompts(given or (), sampling.n, services)
    shortest = min(map(len, prompts), default=0)
    if shortest and body.first_scored is not None and body.first_scored >= shortest:
        raise InvalidRequest(
            f"logprob_start_len={body.first_scored} is not a token of a prompt that has {shortest}: lower it"
        )
    check_prompts(prompts, sampling, services)
    options = RolloutOptions(
        session_id=routing_key or None,
        priority=body.priority,
        cache_salt=body.extra_key,
        on_abort="continue" if body.sampling_params.max_new_tokens == 0 else "return",
        weight_version=body.weight_version,
        adapter=body.lora_path,
        return_routed_experts=body.return_routed_experts or False,
    )
    several = body.rid is not None and len(prompts) > 1
    names = [f"{body.rid}-{i}" if several else body.rid for i in range(len(prompts))]
    rollouts = await roll_out_all(prompts, sampling, services, options, names)
    elapsed_s = time.monotonic() - began
    made = [
        _completion(rollout, completion, sampling, body, services, elapsed_s)
        for rollout in rollouts
        for completion in rollout.completions
    ]
    return made if body.is_batch or sampling.n > 1 else made[0]


def _completion(
    rollout: Rollout,
    completion: Completion,
    sampling: Sampling,
    body: SglangGenerate,
    services: Services,
    elapsed_s: float,
) -> dict[str, object]:
    versions = completion.spans
    if body.sampling_params.max_new_tokens == 0:
        changes = {"token_ids": (), "logprobs": (), "spans": (), "finish_reason": "length"}
        completion = completion.model_copy(update=changes)
    meta: dict[str, object] = {
        "id": rollout.request_id,
        "finish_reason": _finish_reason(completion),
        "prompt_tokens": len(rollout.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": rollout.cached_tokens,
        "weight_versions": spans(completion),
        "e2e_latency": elapsed_s,
    }
    if versions:
        first, last = versions[0].version, versions[-1].version
        meta |= {"weight_version": str(last), "weight_version_start": first, "weight_version_end": last}
    if body.return_logprob:
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if body.first_scored is not None:
        scored = zip(rollout.completions[0].prompt_logprobs or (), rollout.prompt_token_ids, strict=False)
        rows = [[None if row is None else row[0].logprob, token, None] for row, token in scored]
        meta["input_token_logprobs"] = rows[body.first_scored :]
    if completion.routed_experts is not None:
        known = require_known(completion.routed_experts).rows()
        of_tokens = known[: len(rollout.prompt_token_ids) + len(completion.token_ids) - 1]
        meta["routed_experts"] = base64.b64encode(of_tokens.astype("<i4").tobytes()).decode()
    text = text_of(completion, sampling, services, rollout.prompt_token_ids) or ""  # empty without a tokenizer
    return {"text": text, "output_ids": completion.token_ids, "meta_info": meta}


def _finish_reason(completion: Completion) -> dict[str, object]:
    if completion.finish_reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    if completion.finish_reason == "abort":
        message = "cut short by a pause, an update of the weights or a lost replica"
        return {"type": "abort", "message": message, "status_code": None, "err_type": None}
    matched = completion.stop_reason
    if matched is None and completion.token_ids:  # vLLM names no token for the model's own end of sequence
        matched = completion.token_ids[-1]
    return {"type": "stop", "matched": matched}
