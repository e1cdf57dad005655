"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

import httpx

from rollout_service.client._adapters import AdapterCalls
from rollout_service.client._batch import Failures, Group, PartialBatch, first_groups
from rollout_service.client._control import CONTROL_CONNECTIONS, CONTROL_READ_S, ControlCalls
from rollout_service.client._generate import (
    GenerateOptions,
    Prompt,
    ScoreOptions,
    Scores,
    body_of,
    request_from,
    rollout_of,
    score_request,
    scores_of,
    split_options,
)
from rollout_service.client._http import Http, Repeat, request_body
from rollout_service.client._mismatch import MismatchCalls
from rollout_service.client._push import (
    Push,
    PushOptions,
    Quantize,
    Transport,
    announcement,
    require_push_options,
)
from rollout_service.client._sessions import AgentSession
from rollout_service.client._shared_memory import MIN_SHARED_BYTES
from rollout_service.client._stream import PartialRollout, RolloutStream
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, drain
from rollout_service.client._upload import Uploader
from rollout_service.protocol.base import NewVersion
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sessions import OpenSession
from rollout_service.protocol.upload import CommitUpload, PathSource, RollBack, UploadTensor, WaitFor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.connections import affordable_connections
from rollout_service.runtime.tasks import raise_first_failure
from rollout_service.runtime.tls import PinnedCertificates, tls_context

if TYPE_CHECKING:
    from rollout_service.client._delta import DeltaPushes
    from rollout_service.client._tensors import NamedTensors
    from rollout_service.kv_scales import KVScales

MAX_CONNECTIONS = 4096
"""Default of ``max_connections``. It keeps sixteen engines with 256 sequences each busy at ``n=1``."""


class RolloutClient(ControlCalls, AdapterCalls, MismatchCalls):
    """Client of one rollout service. Use it as ``async with RolloutClient(url) as client:``, in one event loop.

    Generation calls and control calls use separate connection pools and do not wait for each other. Cancelling a call
    cancels it on the service too. Proxy settings in the environment are ignored.

    Every call raises the RolloutServiceError of the service's reply, after safe retries. A failed connection raises
    ``httpx.TransportError``.

    Args:
        url: Address of the gateway, e.g. ``http://127.0.0.1:8000``.
        token: Bearer token, sent with every request to ``url`` and to no other address.
        max_connections: Maximum number of concurrent generations; others wait in the client. None: 4096. The client
            raises the soft limit of open files if needed. If the hard limit is too low, it uses fewer and warns.
        timeout_s: Maximum wait in seconds for the reply to one generation. None: no limit.
        retries: Number of attempts after the first, with exponential backoff and jitter, or after the service's
            ``Retry-After``. 8 retries outlast an outage of 16 s, 12 retries one of 32 s.
        ca_file: PEM file with the CA certificates, or the server certificate itself, for an https ``url``. None: the
            CAs of this machine or of ``SSL_CERT_FILE``.
        transport: Replacement for the network, for tests or a proxy. Its own connection limits apply.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_connections: int | None = None,
        timeout_s: float | None = None,
        retries: int = 8,
        ca_file: Path | str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if max_connections is None:
            max_connections = MAX_CONNECTIONS
        if transport is None and max_connections > 0:
            max_connections = affordable_connections(max_connections)
        tls = None if ca_file is None else tls_context(ca_file)
        pinned = PinnedCertificates()
        pool = partial(Http, url, retries=retries, transport=transport)
        control = partial(pool, max_connections=CONTROL_CONNECTIONS, read_timeout_s=CONTROL_READ_S)
        super().__init__(control(token=token, tls=tls))
        self._max_connections = max_connections
        self._data = pool(max_connections=max_connections, read_timeout_s=timeout_s, token=token, tls=tls)
        self._parts = control(token=None, tls=pinned.context)
        self._uploader = Uploader(self._control, self._parts, pinned, plain=transport is None)
        self._deltas: DeltaPushes | None = None
        self._table: tuple[UploadTensor, ...] = ()
        """The tensor table of the previous push."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._data.aclose()
        await self._control.aclose()
        await self._parts.aclose()
        self._uploader.close()
        if self._deltas is not None:
            await self._deltas.wait_until_settled()

    def session(self, session_id: str | None = None, *, ttl_s: float = 3600.0) -> AgentSession:
        """Open a session that records an agent's chat: ``async with client.session() as session:``.

        Args:
            session_id: Letters, digits and ``._:-``. None: the service generates an id.
            ttl_s: Seconds after the last turn until the service deletes the session.
        """
        return AgentSession(self._control, request_body(OpenSession, session_id=session_id, ttl_s=ttl_s))

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Rollout:
        """Sample ``n`` completions of one prompt, given as text or token ids. Parameters have vLLM's names and meaning.

        The client sends the request again if the answer is certainly lost, as after a broken connection. It never does
        so after a timeout.

        Args:
            max_tokens: Maximum number of new tokens per completion. None: the rest of the context.
            top_p, top_k, min_p, min_tokens, structured_outputs, logit_bias: Truncate or bias the vocabulary. Logprobs
                are renormalized, and the rollout is marked ``truncated_sampling``. Read docs/correction.md before
                training on such rollouts.
            stop: Strings that end a completion. They need a tokenizer.
            logprobs: Number of most likely tokens in ``Completion.top_logprobs`` for each token; 0: none.
            min_weight_version: Sample from this weight version or a newer one. Give its number or its label. The
                service waits a limited time for the version. A label costs one query to the ingest per request.
            weight_version: ``{"exact_version": V}`` to sample every token from this version, by number or label.
                ``{"min_version": V}`` means the same as ``min_weight_version``.
            adapter: Name of a LoRA adapter (``push_adapter``). ``run-a`` means its newest version, ``run-a@3`` exactly
                that one. Spans name the version.
            min_adapter_version: Sample from this version of the adapter or a newer one.
            session_id: Calls with the same id go to one replica while it lives, so that they share its prefix cache.
            priority: Requests with lower values are scheduled earlier.
            on_abort: The action when an update, a pause or a lost replica interrupts a completion. ``continue``:
                another replica continues from the tokens so far. ``return``: the completion comes back with
                ``finish_reason="abort"``.
            return_routed_experts: Return the experts of each token in ``Rollout.routed_experts``. The service needs
                ``engine.return_routed_experts``.
            routed_experts_prompt_start: Return experts from this prompt token on. In a conversation, give the last
                token without a row from the previous turn.
            add_special_tokens: True to let the tokenizer add special tokens, such as a beginning of sequence (BOS), to
                a text prompt. None: add them, but no second BOS.
            request_id: Name of this rollout in logs. None: the service generates one.

        Raises:
            InvalidRequest: The service does not accept a parameter or a token.
            TooEarly: No replica reached ``min_weight_version`` in time.
            VersionNotServed: No replica serves what ``weight_version`` asks for; ``detail["live"]`` has what each one
                serves.
            NotFound: No version has that label.
            Overloaded, NotReady: The service refused every attempt.
        """
        request = request_from(prompt, request_id, options)
        reply = await self._data.send("POST", "/inference/v1/generate", json=body_of(request), repeat=Repeat.IF_LOST)
        return rollout_of(reply, request)

    async def score(
        self,
        tokens: Sequence[int],
        *,
        start: int = 1,
        top_logprobs: int = 0,
        target_token_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return the logprobs of given tokens, as a teacher's of a student's completion.

        Args:
            tokens: Token ids of prompt and completion together.
            start: First token that is scored.
            top_logprobs: Number of most likely tokens beside each token, at most ``engine.max_logprobs``.
            target_token_ids: Tokens to score instead, a list for each token from ``start`` on. The engine needs a GPU.
            **options: See ``generate``.

        Raises:
            InvalidRequest: The service does not accept an argument. Other errors are those of ``generate``.
        """
        asked = {"start": start, "top_logprobs": top_logprobs, **options}
        request = score_request(tokens, target_token_ids, asked)
        body = request.model_dump(mode="json", exclude_defaults=True)
        return scores_of(await self._data.send("POST", "/inference/v1/score", json=body, repeat=Repeat.IDEMPOTENT))

    def generate_stream(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[GenerateOptions]
    ) -> RolloutStream:
        """Stream ``generate``: ``async with client.generate_stream(prompt) as stream:``.

        ``async for piece in stream:`` yields a ``StreamPiece`` whenever new tokens of a completion arrive. Afterwards
        ``stream.rollout`` equals the result of ``generate``. Leaving the block early cancels the rest on the service;
        ``stream.partial`` holds the tokens read so far.

        Args:
            prompt: Text or token ids. Pieces include text if the prompt is text.
            request_id: See ``generate``.
            **options: See ``generate``.

        Raises:
            InvalidRequest: The service does not accept a parameter. Other errors are raised on entering the block, or
                by the iteration.
        """
        return RolloutStream(self._data, request_from(prompt, request_id, options))

    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt | PartialRollout],
        *,
        until: None = None,
        concurrency: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]: ...

    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt | PartialRollout],
        *,
        until: int,
        concurrency: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> PartialBatch: ...

    async def generate_batch(
        self,
        prompts: Iterable[Prompt | PartialRollout],
        *,
        until: int | None = None,
        concurrency: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout] | PartialBatch:
        """Call ``generate`` for many prompts concurrently. Rollouts have the order of the prompts.

        A prompt that the service refuses, or that fails on every replica, does not end the others. When all are done,
        ``BatchFailed`` reports each failed prompt and holds the other rollouts. Any other error cancels the rest, here
        and on the service.

        Args:
            prompts: Text, token ids, or partial rollouts of an earlier call. A partial rollout keeps its finished
                completions; the others continue from their tokens with the options of this call. ``max_tokens`` counts
                those tokens too, and ``n`` applies to new prompts only.
            until: Return a ``PartialBatch`` as soon as this many groups (a prompt's ``n`` completions) are complete. It
                also holds the unfinished groups, which a later call can continue. The engines stop them at once and
                lose about the last 0.1 s of tokens. Continue all of them: short completions finish first, so dropping
                the rest biases training towards short ones. Fewer groups come back if completions end with "abort"
                (``on_abort="return"``, or attempts exhausted); these are returned as partial.
            concurrency: Maximum number of concurrent requests. None, or a larger number, means ``max_connections``.
            progress: Called after each rollout with (rollouts done, prompts). With ``until``, called with (groups
                complete, ``until``).
            **options: See ``generate``; the same for all prompts. ``return_routed_experts`` and
                ``routed_experts_prompt_start`` do not work with ``until`` or partial rollouts.

        Raises:
            BatchFailed: Some prompts failed. It holds the other rollouts and is also an instance of its first error's
                class.
            InvalidRequest: The service does not accept an option for any prompt.
        """
        waiting = _prompt_list(prompts)
        if until is not None and not 1 <= until <= len(waiting):
            raise ValueError(f"until={until} groups of {len(waiting)} prompts: give 1 to {len(waiting)}")
        sampling, about = split_options(options)
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least one request at a time is needed")
        max_requests = min(concurrency or self._max_connections, self._max_connections)
        if until is None:
            return await self._generate_all(waiting, max_requests, progress, options)
        failures, groups = Failures(), list[Group]()
        for index, prompt in enumerate(waiting):
            with failures.of(index):
                groups.append(Group(self._data, prompt, sampling, about))
        if failures.errors:
            raise failures.batch_failed({}, {}, len(waiting))
        return await first_groups(groups, until, max_requests, progress)

    async def _generate_all(
        self,
        prompts: Sequence[Prompt | PartialRollout],
        max_requests: int,
        progress: Callable[[int, int], None] | None,
        options: GenerateOptions,
    ) -> list[Rollout]:
        """Return a rollout for each prompt. Raises BatchFailed with the other rollouts if some prompts fail."""
        sampling, about = split_options(options)
        rollouts: dict[int, Rollout] = {}
        failures = Failures()
        queue = iter(enumerate(prompts))

        async def work() -> None:
            slot = asyncio.Semaphore(1)
            for index, prompt in queue:
                with failures.of(index):
                    if isinstance(prompt, PartialRollout):
                        group = Group(self._data, prompt, sampling, about)
                        await group.run(slot)
                        rollouts[index] = group.rollout()
                    else:
                        rollouts[index] = await self.generate(prompt, **options)
                    if progress is not None:
                        progress(len(rollouts), len(prompts))

        with failures.suppress_recorded():
            async with raise_first_failure() as group:
                for _ in range(min(max_requests, len(prompts))):
                    group.create_task(work())
        if failures.errors:
            raise failures.batch_failed(rollouts, {}, len(prompts))
        return [rollouts[index] for index in range(len(prompts))]

    @overload
    def push_weights(
        self,
        version: NewVersion,
        named_tensors: NamedTensors,
        *,
        send: Literal[True] = True,
        **options: Unpack[PushOptions],
    ) -> Coroutine[object, None, WeightStatus]: ...

    @overload
    def push_weights(
        self, version: NewVersion, named_tensors: NamedTensors, *, send: bool, **options: Unpack[PushOptions]
    ) -> Coroutine[object, None, WeightStatus | None]: ...

    def push_weights(
        self,
        version: NewVersion,
        named_tensors: NamedTensors,
        *,
        send: bool = True,
        label: str | None = None,
        tensor_table: Sequence[UploadTensor] | None = None,
        quantize: Quantize | None = None,
        transport: Transport = "auto",
        kv_scales: KVScales | None = None,
        mode: PauseMode = "keep",
        wait: WaitFor = "all",
        timeout_s: float = 600.0,
        parallel_parts: int = 8,
        progress: Progress | None = None,
    ) -> Coroutine[object, None, WeightStatus | None]:
        """Upload one weight version tensor by tensor, commit it, and wait until every live replica serves it.

        Tensors are bfloat16, float16 or float32 under Hugging Face's names, on any device. Routed experts may be
        separate tensors or stacked as in transformers 5. Do not change the tensors until the call returns.

        Host memory needed: the largest tensor and about ``parallel_parts + 1`` parts of 16 MiB, unless the service sets
        another size. Contiguous CPU tensors need no extra memory if ``named_tensors`` is no iterator. Other CPU tensors
        are copied whole; at most the last two are in memory at once.

        With FSDP, each ``DTensor`` is gathered in turn, which is a collective. Call this on every rank of the mesh with
        the same tensors and ``send=rank == 0``. Run no other collective on the mesh meanwhile. If sending fails, rank 0
        joins the remaining gathers before it raises, so that no other rank hangs. The caller must tell the other ranks
        about the failure.

        A failed push of a number may be repeated, also with other weights. The client does not send parts again that
        the service has.

        Args:
            version: A number larger than any before, such as the trainer's step. ``"next"``: the service assigns the
                next number and returns it. Use ``"next"`` if the trainer's step may go back, as after resuming from an
                older checkpoint.
            named_tensors: A module (its ``state_dict``), a mapping, or pairs. With ``tensor_table``, a generator is
                consumed once, one tensor at a time. Without it, the generator is read to its end first to learn names
                and shapes. Parameters and ``DTensor`` are kept by reference; other tensors are copied to host memory. A
                generator may refill one buffer for each tensor, but not for parameters yielded without a table.
                ValueError then names an overwritten parameter, and nothing is committed.
            send: False: only join the gathers, and return None.

        ``PushOptions`` describes the other arguments.

        Raises:
            ValueError: An unsupported dtype, a duplicate name, or tensors that differ from the table.
            InvalidManifest: Names or shapes differ from the served model's, or KV scales do not match its layers.
            QuantizationError: A weight is NaN or infinite. Nothing is committed.
            VersionConflict: The version is not newer than the newest, or was pushed again meanwhile.
            NotShared: ``transport`` is ``"shared_memory"`` or ``"cuda_ipc"``, and the ingest cannot reach this
                process's memory. The message has the reason.
            CommitTimeout: The version is committed, but a replica did not serve it in time. ``detail`` lists the
                replicas.
        """
        # Not a coroutine function: SyncRolloutClient runs this part in the caller's thread, because its CUDA stream
        # matters.
        require_push_options(quantize, transport, parallel_parts)
        commit = request_body(CommitUpload, mode=mode, wait=wait, timeout_s=timeout_s)
        thread, scales = TensorThread(), None if kv_scales is None else kv_scales.named()

        async def run() -> WeightStatus | None:
            try:
                source = await thread.call(TensorSource, named_tensors, tensor_table, self._table)
                self._table = source.table
                if not send:
                    await thread.call(drain, source)
                    return None
                push = Push(
                    version, source, thread, label, quantize, transport, scales, commit, parallel_parts, progress
                )
                if transport == "delta" or (
                    transport == "auto" and quantize == "trainer" and self._delta_is_better(source)
                ):
                    return await self._delta_pushes().push(push)
                number, sent = await self._uploader.send_tensors(push)
            finally:
                thread.close()
            return await self._uploader.commit(number, push.commit_of(sent))

        return run()

    def _delta_pushes(self) -> DeltaPushes:
        from rollout_service.client._delta import DeltaPushes  # imports torch

        if self._deltas is None:
            self._deltas = DeltaPushes(self._uploader)
        return self._deltas

    def _delta_is_better(self, source: TensorSource) -> bool:
        large = sum(tensor.nbytes for tensor in source.table) >= MIN_SHARED_BYTES
        return large and not self._uploader.may_share(source) and self._delta_pushes().are_worth_it(source.table)

    async def push_path(
        self,
        version: NewVersion,
        path: str | Path,
        *,
        label: str | None = None,
        kv_scales: KVScales | None = None,
        mode: PauseMode = "keep",
        wait: WaitFor = "all",
        timeout_s: float = 600.0,
    ) -> WeightStatus:
        """Create a version from a Hugging Face folder that the service reads itself. Other arguments as for
        ``push_weights``.

        ``path`` must lie below one of the service's ``weights.source_roots``. Raises Forbidden if it does not, and
        VersionConflict as ``push_weights``.
        """
        source = PathSource(path=Path(path).absolute())
        commit = request_body(CommitUpload, mode=mode, wait=wait, timeout_s=timeout_s)
        scales = None if kv_scales is None else kv_scales.named()
        plan = await self._uploader.begin(announcement(version, source=source, kv_scales=scales, label=label))
        digest = {"upload_digest": plan.upload_digest}
        return await self._uploader.commit(plan.version, commit.model_copy(update=digest))

    async def rollback(
        self,
        to: int | str,
        *,
        mode: PauseMode = "keep",
        wait: WaitFor = "all",
        timeout_s: float = 600.0,
    ) -> WeightStatus:
        """Make an older version the newest again, under a new number, and wait until every live replica serves it.

        Nothing is uploaded. Nothing is copied either if the log's file system has hard links. The new version keeps the
        old label. If the newest version already has these weights, the call returns it unchanged.

        Args:
            to: Number or label of a version that the service keeps; ``weights()`` lists them.
            mode, wait, timeout_s: See ``push_weights``.

        Raises:
            NotFound: The version does not exist, or is no longer on disk. The message lists the available ones.
            LogCorrupt: The version's files are damaged.
            CommitTimeout: The version is the newest, but a replica did not serve it in time.
        """
        return await self._uploader.roll_back(request_body(RollBack, to=to, mode=mode, wait=wait, timeout_s=timeout_s))


def _prompt_list(prompts: Iterable[Prompt | PartialRollout]) -> list[Prompt | PartialRollout]:
    if isinstance(prompts, str):
        raise TypeError("prompts is one str: put it in a list, or call generate()")
    return list(prompts)
