"""An ``EngineClient`` for vLLM's server classes. It represents all replicas, behind the dispatcher.

Imports vLLM's server, see ``compat/vllm_serving.py``.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

from pydantic import ValidationError
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.logprobs import Logprob
from vllm.outputs import WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from rollout_service.compat.vllm_serving import EngineClient
from rollout_service.errors import BadRequest, InvalidRequest, RolloutServiceError
from rollout_service.fleet.detokenizer import TokenStrings
from rollout_service.fleet.progress import CompletionDelta
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.generate import candidates
from rollout_service.gateway.openai.exchange import current
from rollout_service.gateway.prompts import roll_out
from rollout_service.gateway.streams import TextStream, live_pieces, text_of, token_strings
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.sampling import Reasoning, Sampling, StructuredOutputs
from rollout_service.web.errors import bad_request

_AS_THEY_ARE = frozenset(Sampling.model_fields) & frozenset(SamplingParams.__struct_fields__) - {
    "structured_outputs",
    "output_kind",
    "extra_args",
    "routed_experts_prompt_start",
}
"""Sampling parameters that vLLM and this service share, in the same format."""
_OF_THE_REPLY = frozenset(
    {"output_kind", "stream_interval", "flat_logprobs", "skip_clone", "output_text_buffer_length"}
)
"""Parameters that control the chunks of the engine's output."""
_VLLMS_OWN = frozenset({"skip_reading_prefix_cache", "routed_experts_prompt_start"})
"""Parameters that vLLM always sets, or sets with another field. No chat request can set the former."""
_AS_REQUESTED = {"extra_args": "vllm_xargs, kv_transfer_params or ec_transfer_params"}
_DEFAULTS = SamplingParams()


def _not_here(name: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"EngineClient.{name} is not implemented: routes of this service replace it")

    return refuse


# vLLM's chat classes call none of the methods that are not defined below
_Refusing: Any = type(
    "_Refusing", (EngineClient,), {name: _not_here(name) for name in EngineClient.__abstractmethods__}
)


class DispatchedEngine(_Refusing):
    """The part of vLLM's ``EngineClient`` that its chat classes use: ``generate``."""

    def __init__(self, services: Services, vllm_config: VllmConfig, renderer: Any) -> None:
        """Create the client. ``renderer``: vLLM's renderer, with the tokenizer and the chat template."""
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer
        self.input_processor = None  # used for prompts with images, which are refused
        self._services = services

    is_running = property(lambda self: True)
    is_stopped = property(lambda self: False)
    errored = property(lambda self: False)
    dead_error = property(lambda self: NotImplementedError("the dispatcher does not die"))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        lora_request: object = None,
        **others: object,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield outputs as ``output_kind`` requires: the new tokens each time, or one output when all completions are
        done.

        A stream reports the ends of all completions together, with the fields of the whole reply. Tracing headers are
        not forwarded. The adapter is in the exchange's options.
        """
        exchange = current.get()
        try:
            unknown = sorted(name for name, value in others.items() if value is not None)
            if unknown:
                raise BadRequest(f"{', '.join(unknown)}: not implemented; leave it out", {"not_implemented": unknown})
            sampling = sampling_of(sampling_params, exchange.stop)
            options = _with_options(
                exchange.options,
                priority=priority,
                session_id=session_id or exchange.options.session_id,
                cache_salt=prompt.get("cache_salt"),
            ).model_copy(update={"request_id": request_id})  # longer than a caller's, by vLLM's prefix
            reasoning = Reasoning(ended=reasoning_ended, parser_kwargs=reasoning_parser_kwargs or {})
            token_ids = _token_ids(prompt)
            if sampling_params.output_kind == RequestOutputKind.DELTA:
                pieces = live_pieces(token_ids, sampling, self._services, options, reasoning)
                async with aclosing(self._deltas(pieces, token_ids, request_id, sampling, sampling_params)) as outputs:
                    async for output in outputs:
                        yield output
                return
            rollout = await roll_out(token_ids, sampling, self._services, options, reasoning)
        except RolloutServiceError as error:
            # OpenAI and Anthropic define 400 where other routes answer 422
            refusal = BadRequest(error.message, error.detail) if type(error) is InvalidRequest else error
            exchange.error = refusal
            raise refusal from error
        exchange.rollouts.append(rollout)
        output = _output(rollout, sampling, sampling_params, self._services)
        exchange.texts += [each.text for each in output.outputs]
        yield output

    async def _deltas(
        self,
        pieces: AsyncGenerator[CompletionDelta | Rollout],
        prompt: tuple[int, ...],
        request_id: str,
        sampling: Sampling,
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield vLLM outputs with the new tokens each time."""
        exchange, ends = current.get(), list[CompletionOutput]()
        tokenizer = self._services.tokenizer
        texts = [TextStream(prompt, sampling, tokenizer) for _ in range(sampling.n)]
        names = [token_strings(prompt, tokenizer) for _ in range(sampling.n)]
        async with aclosing(pieces):
            async for piece in pieces:
                exchange.begun = True
                if isinstance(piece, Rollout):
                    exchange.rollouts.append(piece)
                    continue
                index = piece.made.index
                text = texts[index].add(piece.made, piece.is_last)
                output = _completion_output(piece.made, text, piece.is_last, params, names[index])
                if piece.is_last:
                    ends.append(output)
                else:
                    yield _request_output(request_id, prompt, [output], finished=False)
        yield _request_output(request_id, prompt, ends, finished=True)


def _with_options(options: RolloutOptions, **changes: object) -> RolloutOptions:
    """Return ``options`` with the values that vLLM read from the body or a header. Raises BadRequest if one is
    invalid."""
    try:
        return RolloutOptions.model_validate({**options.model_dump(), **changes})
    except ValidationError as error:
        raise bad_request("the request", error) from error


def sampling_of(params: SamplingParams, stop: tuple[str, ...] = ()) -> Sampling:
    """Return vLLM's sampling parameters and ``stop`` in this service's format. Raises BadRequest and names unsupported
    ones.

    vLLM's request models silently drop unknown fields. Known but unsupported parameters are refused here.
    """
    unknown = [
        _AS_REQUESTED.get(name, name)
        for name in SamplingParams.__struct_fields__
        if not name.startswith("_") and name not in _AS_THEY_ARE | _OF_THE_REPLY | _VLLMS_OWN | {"structured_outputs"}
        if getattr(params, name) != getattr(_DEFAULTS, name) and getattr(params, name) != {}
    ]
    if unknown:
        raise BadRequest(f"{', '.join(unknown)}: not implemented; leave it out", {"not_implemented": unknown})
    fields = {name: getattr(params, name) for name in _AS_THEY_ARE}
    fields["stop"] = (*stop, *(fields["stop"] or ()))
    try:
        return Sampling.model_validate(
            fields | {"structured_outputs": _structured_outputs_of(params.structured_outputs)}
        )
    except ValidationError as error:
        raise bad_request("sampling parameters", error) from error


def _structured_outputs_of(params: object | None) -> StructuredOutputs | None:
    if params is None:
        return None
    names = [field.alias or name for name, field in StructuredOutputs.model_fields.items()]
    return StructuredOutputs.model_validate({name: getattr(params, name) for name in names})


def _token_ids(prompt: Mapping[str, object]) -> tuple[int, ...]:
    if prompt.get("type") != "token":
        raise BadRequest("the messages hold more than text, which is not implemented: send text")
    ids = prompt["prompt_token_ids"]
    assert isinstance(ids, Sequence)
    return tuple(ids)


def _output(rollout: Rollout, sampling: Sampling, params: SamplingParams, services: Services) -> RequestOutput:
    prompt, prompt_logprobs = rollout.prompt_token_ids, rollout.completions[0].prompt_logprobs
    outputs = [
        _completion_output(
            each,
            text_of(each, sampling, services, prompt) or "",
            True,
            params,
            token_strings(prompt, services.tokenizer),
        )
        for each in rollout.completions
    ]
    output = _request_output(rollout.request_id, prompt, outputs, finished=True)
    if prompt_logprobs is not None:
        names, output.prompt_logprobs = token_strings((), services.tokenizer), []
        for token, row in zip(prompt, prompt_logprobs, strict=True):
            output.prompt_logprobs.append(None if row is None else _by_id(row, names))
            names.add(token)
    return output


def _request_output(
    request_id: str, prompt: tuple[int, ...], outputs: list[CompletionOutput], *, finished: bool
) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=list(prompt),
        prompt_logprobs=None,
        outputs=outputs,
        finished=finished,
    )


def _completion_output(
    completion: Completion, text: str, has_ended: bool, params: SamplingParams, names: TokenStrings
) -> CompletionOutput:
    """Return a completion in vLLM's format. ``names`` advances past the completion's tokens."""
    logprobs: list[dict[int, Logprob]] | None = None
    if params.logprobs is not None:
        logprobs = []
        for row in candidates(completion):
            logprobs.append(_by_id(row, names))
            names.add(row[0].token_id)
    return CompletionOutput(
        index=completion.index,
        text=text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=completion.finish_reason if has_ended else None,
        stop_reason=completion.stop_reason,
        weight_versions=[WeightVersionSpan(str(s.version), s.start, s.end) for s in completion.spans],
    )


def _by_id(row: Sequence[Candidate], names: TokenStrings) -> dict[int, Logprob]:
    strings = names.of_next([c.token_id for c in row])
    return {c.token_id: Logprob(c.logprob, c.rank or None, s) for c, s in zip(row, strings, strict=True)}
