"""What the JSON of a large reply costs gateway and client: an object a token, as vLLM's form has it, and flat lists.

    python -m benchmarks.rollout.reply_json

One request of ``--n`` completions of ``--tokens`` tokens goes through the gateway's real route in this process, with
an engine that has the answer ready; its reply is then read by our client's own function. *Gateway* is the whole request
but for the engine and the sockets: reading and checking it, making the reply, writing it. The client only ever asks for
flat lists; for the other form a pydantic model of it is read here. One core, medians.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx
import torch
import typer
from pydantic import BaseModel, FiniteFloat, TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from rollout_service.client._generate import body_of, request_of, rollout_of
from rollout_service.config import MonitorConfig, ShadowConfig
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.monitor.feed import RolloutFeed
from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.shadow.feed import ShadowFeed
from rollout_service.web.auth import Authorizer

VOCABULARY, PROMPT_TOKENS = 151_936, 512
ROUTE = "/inference/v1/generate"


class _Token(BaseModel):
    token_id: int
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_Token]


class _Choice(BaseModel):
    index: int
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    finish_reason: str
    weight_versions: tuple[Span, ...]


class ByToken(BaseModel):
    """A reply in vLLM's form."""

    request_id: str
    choices: list[_Choice]


class ReadyEngine:
    """In the dispatcher's place: always the same completions."""

    def __init__(self, n: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (n, tokens), generator=generator).tolist()
        logprobs = (-torch.rand((n, tokens), generator=generator) * 8).tolist()
        spans = (Span(version=7, start=0, end=tokens),)
        self._completions = tuple(
            Completion(index=i, token_ids=tuple(t), logprobs=tuple(lp), finish_reason="length", spans=spans)
            for i, (t, lp) in enumerate(zip(ids, logprobs, strict=True))
        )

    async def complete(self, call: GenerateCall, on_abort: str) -> Rollout:
        """See ``Dispatcher.complete``."""
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=self._completions,
            replica_id="engine#1",
        )


def services(engine: ReadyEngine) -> Services:
    """What the route stands on, with nobody behind it."""
    return Services(
        name="model",
        vocab_size=VOCABULARY,
        max_model_len=32_768,
        tokenizer=None,
        dispatcher=engine,  # type: ignore[arg-type]
        ingest=None,
        authorizer=Authorizer(None),
        http=httpx.AsyncClient(),
        monitor=None,
        feed=RolloutFeed(None, MonitorConfig(remember_tokens=0).remember_tokens),
        shadow=ShadowFeed(None, ShadowConfig()),
    )


async def posted(app: Any, body: bytes) -> bytes:
    """The reply's body. Raises RuntimeError if it is an error."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": ROUTE}
    await app({**scope, "raw_path": ROUTE.encode(), "query_string": b"", "headers": headers}, receive, send)
    reply = b"".join(message.get("body", b"") for message in sent)
    if sent[0]["status"] != 200:
        raise RuntimeError(f"{sent[0]['status']}: {reply[:200]!r}")
    return reply


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Of one call, after three that are not counted."""
    seconds = []
    for _ in range(3 + repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[3:])


def main(n: int = 16, tokens: int = 512, repeats: int = 50) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/reply_json.json."""
    asked = request_of(list(range(PROMPT_TOKENS)), Sampling(n=n, max_tokens=tokens, ignore_eos=True))
    flat = body_of(asked)
    by_token = {name: value for name, value in flat.items() if name != "flat_logprobs"}
    app, cases = create_app(services(ReadyEngine(n, tokens))), []
    with asyncio.Runner() as runner:
        for form, body in (("object a token", by_token), ("flat_logprobs", flat)):
            request = json.dumps(body).encode()
            reply = runner.run(posted(app, request))
            response = httpx.Response(200, content=reply, request=httpx.Request("POST", f"http://service{ROUTE}"))
            read: Callable[[], object] = (
                (lambda response=response: rollout_of(response, asked))
                if body is flat
                else (lambda reply=reply: TypeAdapter(ByToken).validate_json(reply))
            )
            gateway_ms = median_ms(lambda request=request: runner.run(posted(app, request)), repeats)
            client_ms = median_ms(read, repeats)
            cases.append({"form": form, "bytes": len(reply), "gateway_ms": gateway_ms, "client_ms": client_ms})
    table = Table(title=f"a reply of {n} × {tokens} tokens on one core of {results.machine()}")
    for column in ("form", "kB", "gateway, ms", "client, ms"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for case in cases:
        table.add_row(
            case["form"], f"{case['bytes'] / 1e3:.0f}", f"{case['gateway_ms']:.1f}", f"{case['client_ms']:.1f}"
        )
    Console().print(table)
    results.write("reply_json", {"n": n, "tokens": tokens, "repeats": repeats, "cases": cases})


if __name__ == "__main__":
    typer.run(main)
