"""vLLM's server classes, created at the first chat. Importing them takes seconds, and not every service needs chats."""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rollout_service.config import ChatConfig, ServiceConfig
from rollout_service.errors import InvalidRequest
from rollout_service.runtime.logs import TELL_VLLM
from rollout_service.sessions.probe import begins_branches, outcomes_of, summary
from rollout_service.sessions.template import REASONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout_service.compat.vllm_serving import (
        AnthropicServingMessages,
        OpenAIServingChat,
        OpenAIServingModels,
        OpenAIServingResponses,
        ServingTokenization,
    )
    from rollout_service.gateway.dependencies import Services


logger = logging.getLogger(__name__)

MAX_NAMES = 1000
"""Maximum number of names of adapters, with and without versions, that vLLM's classes are told."""


@dataclass(frozen=True)
class Serving:
    """vLLM's server objects, one per API."""

    chat: "OpenAIServingChat"
    responses: "OpenAIServingResponses"
    messages: "AnthropicServingMessages"
    tokenization: "ServingTokenization"
    models: "OpenAIServingModels"

    def accept(self, adapter: str) -> None:
        """Let vLLM's classes accept the name of an adapter as the model of a request."""
        from vllm.lora.request import LoRARequest

        if adapter not in self.models.lora_requests:
            if len(self.models.lora_requests) >= MAX_NAMES:
                self.models.lora_requests.clear()
            self.models.lora_requests[adapter] = LoRARequest(adapter, 1, "the dispatcher names it")


class LazyServing:
    """Creates the server objects once."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._made: Serving | None = None
        self._making = asyncio.Lock()

    def make_if_configured(self, services: "Services") -> None:
        """Create the objects now if chats are configured. A missing template or parser then stops the gateway's
        start."""
        if self._config.chat != ChatConfig():
            _import()
            self._made = make(self._config, services)

    async def get(self, services: "Services") -> Serving:
        """Return the server objects. Raises InvalidRequest if the model has no tokenizer."""
        if services.tokenizer is None:
            raise InvalidRequest(f"{services.name} has no tokenizer: send token ids to /inference/v1/generate")
        async with self._making:
            if self._made is None:
                await asyncio.to_thread(_import)
                self._made = make(self._config, services)
            return self._made


def _import() -> None:
    """Import vLLM's server. Runs in a thread, so that the gateway still answers, if slowly."""
    os.environ.update(TELL_VLLM)  # noqa: TID251 - vLLM looks when it is imported
    import rollout_service.gateway.openai.engine  # noqa: F401


def make(config: ServiceConfig, services: "Services") -> Serving:
    """Create the server objects. Raises ValueError or KeyError for a template or a parser that vLLM does not know."""
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig

    from rollout_service.compat import vllm_serving as vllm
    from rollout_service.gateway.openai.engine import DispatchedEngine
    from rollout_service.gateway.openai.recording import (
        ContinuingRenderer,
        RecordedChat,
        RecordedMessages,
        RecordedResponses,
    )

    chat = config.chat
    args = AsyncEngineArgs(
        model=str(config.model.path),
        served_model_name=[services.name, *services.aliases],
        max_model_len=config.engine.max_model_len,
        max_logprobs=config.engine.max_logprobs,
        enforce_eager=True,
        language_model_only=True,  # as in the engines: images are refused
        generation_config="vllm",  # as in the engines: the model's own defaults must not override a trainer's request
        reasoning_parser=chat.reasoning_parser or "",
    )
    model_config = args.create_model_config()
    model_config.quantization = None  # no weights are loaded here
    vllm_config = VllmConfig(
        model_config=model_config, structured_outputs_config=args.create_structured_outputs_config()
    )
    renderer = vllm.renderer_from_config(vllm_config)
    engine = DispatchedEngine(services, vllm_config, renderer)
    names = (services.name, *services.aliases)
    models = vllm.OpenAIServingModels(engine, [vllm.BaseModelPath(name, str(config.model.path)) for name in names])
    template: dict[str, Any] = {
        "chat_template": vllm.load_chat_template(chat.chat_template),
        "chat_template_content_format": "auto",
    }
    trusted: dict[str, Any] = {"trust_request_chat_template": False}
    parsers: dict[str, Any] = {
        "enable_auto_tools": chat.tool_parser is not None,
        "tool_parser": chat.tool_parser,
        "reasoning_parser": chat.reasoning_parser or "",
    }
    _log_template(services, template["chat_template"], str(getattr(model_config.hf_config, "model_type", "")))
    online = ContinuingRenderer(model_config, renderer, request_logger=None, **template, **trusted, **parsers)
    common = {"online_renderer": online, "request_logger": None, **template, **parsers}
    return Serving(
        chat=RecordedChat(engine, models, "assistant", **common, **trusted),
        responses=RecordedResponses(engine, models, **common),
        messages=RecordedMessages(engine, models, "assistant", **common),
        tokenization=vllm.ServingTokenization(models, online, request_logger=None, **template, **trusted),
        models=models,
    )


def _log_template(services: "Services", template: str | None, model_type: str) -> None:
    """Log whether sessions can continue turns with the chat template."""
    if model_type == "gpt_oss":
        logger.warning("sessions begin a branch at each turn: %s", REASONS["harmony"])
    elif template is not None or getattr(services.tokenizer, "chat_template", None):
        found = outcomes_of(cast("PreTrainedTokenizerBase", services.tokenizer), template)
        logger.log(logging.WARNING if begins_branches(found) else logging.INFO, "chat template: %s", summary(found))
