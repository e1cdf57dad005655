# mypy: implicit-reexport
# ruff: noqa: F401 - names for other modules
"""Undocumented names of vLLM's HTTP server that this package uses: its classes for chats, and their parts.

vLLM documents the routes, not the classes. ``gateway/openai/`` passes its dispatcher to them in place of an engine.
Importing this file takes seconds and 150 MB, so ``gateway/openai/serving.py`` only imports it for the first chat.
"""

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
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
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.parser import Parser
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.mistral import is_mistral_tokenizer
