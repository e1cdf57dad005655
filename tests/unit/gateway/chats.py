"""What tests of chats share: an engine in this process that says what it is told to, and a gateway in front of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_service.config import ServiceConfig
from rollout_service.model.tiny import EOS, VOCABULARY
from rollout_service.protocol.rollout import Candidate, Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall

URL = "http://127.0.0.1"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant: "
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(character) for character in text)


@dataclass
class ScriptedEngine:
    """Says ``text``, then the end of sequence, under versions 3 and 4."""

    text: str = "hello"
    tokens: tuple[int, ...] = ()
    """Said instead of ``text``."""
    stop_reason: int | str | None = None
    cut_after: int | None = None
    """Of the tokens only so many are said; then a pause returns the completion as it is."""
    calls: list[GenerateCall] = field(default_factory=list)
    error: Exception | None = None

    async def generate(self, call: GenerateCall) -> Rollout:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        tokens = (self.tokens or (*ids(self.text), VOCABULARY.index(EOS)))[: self.cut_after]
        parts = ((3, 0, 1), (4, 1, len(tokens)))[: len(tokens)]
        spans = tuple(Span(version=version, start=start, end=end) for version, start, end in parts)
        k = call.sampling.logprobs or 0
        completions = tuple(
            Completion(
                index=index,
                token_ids=tokens,
                logprobs=(-0.5,) * len(tokens),
                finish_reason="stop" if self.cut_after is None else "abort",
                stop_reason=self.stop_reason,
                spans=spans,
                top_logprobs=tuple((Candidate(t, -0.5, 1), Candidate(5, -2.0, 2))[:k] for t in tokens) if k else None,
            )
            for index in range(call.sampling.n)
        )
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id="r1",
            returned=self.cut_after is not None,
        )


def spans(versions: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return the version, the start and the end of each span of a reply."""
    return [(span["version"], span["start"], span["end"]) for span in versions]


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events that are JSON objects."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with ``[DONE]``."""
    *lines, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def config_of(model: Path, **chat: object) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": {"path": model, "aliases": ["org/tiny"]},
            "engine": {"max_model_len": 512},
            "chat": {"tool_parser": "hermes", **chat},
        }
    )
