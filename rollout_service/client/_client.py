"""The asynchronous client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack, get_args, overload
from urllib.parse import quote

import httpx

from rollout_service.client._batch import Failures, Group, first_groups
from rollout_service.client._control import CONTROL_CONNECTIONS, CONTROL_READ_S, ControlCalls
from rollout_service.client._generate import GenerateOptions, Prompt, body_of, request_of, rollout_of, sampling_of
from rollout_service.client._http import Http, parse
from rollout_service.client._mismatch import MismatchCalls
from rollout_service.client._partial import BatchFailed, PartialBatch, PartialRollout
from rollout_service.client._retry import Repeat
from rollout_service.client._sessions import AgentSession
from rollout_service.client._shared_memory import LEAST_SHARED_BYTES
from rollout_service.client._stream import RolloutStream
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, drain
from rollout_service.client._upload import Quantize, Transport, Uploader, announcement, named_scales
from rollout_service.connections import affordable_connections
from rollout_service.protocol.base import NewVersion
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.generate import DetachedRollout
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sessions import OpenSession
from rollout_service.protocol.upload import CommitUpload, PathSource, RollBack, UploadTensor, WaitFor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.tasks import raise_first_failure
from rollout_service.tls import PinnedCertificates, trusting

if TYPE_CHECKING:
    from rollout_service.client._delta import DeltaPushes
    from rollout_service.client._tensors import NamedTensors
    from rollout_service.kv_scales import KVScales

MAX_CONNECTIONS = 4096
"""Default of ``max_connections``: sixteen engines that decode 256 sequences each are busy with ``n=1``."""
_ABOUT_THE_REQUEST = (
    "min_weight_version",
    "session_id",
    "priority",
    "on_abort",
    "return_routed_experts",
    "add_special_tokens",
)
"""Of the options of a generation: what says nothing of how to sample."""


def _rollout_url(rollout_id: str) -> str:
    return f"/v1/rollouts/{quote(rollout_id, safe='')}"


class RolloutClient(ControlCalls, MismatchCalls):
    """Talks to one rollout service. Use it as ``async with RolloutClient(url) as client:``, in one event loop.

    Generations, and weight and control calls, have connection pools of their own, so that neither waits for the
    other. A cancelled call is cancelled on the service too. No proxy is used, whatever the environment says.

    Every call raises the RolloutServiceError that the service answered with, after retries where repeating is safe,
    or ``httpx.TransportError`` when the connection fails.

    Args:
        url: Address of the gateway, e.g. ``http://127.0.0.1:8000``.
        token: Bearer token, sent with every request to ``url``, and to no other address.
        max_connections: Maximum number of generations under way at once; others wait in the client. None: 4096. Fewer,
            with a warning, if this process cannot open so many files. Its soft limit is raised where it must be.
        timeout_s: Longest wait for the reply to one generation; None: as long as it takes.
        retries: Attempts after the first, with exponential backoff and jitter, or after the wait the service asks for.
            8 outlive an outage of 16 s, 12 one of 32 s.
        ca_file: File in PEM with the authorities, or the certificate itself, by which to trust an https ``url``; None:
            those of this machine, or of ``SSL_CERT_FILE``.
        transport: Takes the place of the network, for tests or for a proxy; connection limits are then its own.
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
        tls = None if ca_file is None else trusting(ca_file)
        pinned = PinnedCertificates()

        def pool(
            num_connections: int,
            read_timeout_s: float | None,
            token: str | None = token,
            tls: ssl.SSLContext | None = tls,
        ) -> Http:
            return Http(
                url,
                token=token,
                retries=retries,
                max_connections=num_connections,
                read_timeout_s=read_timeout_s,
                transport=transport,
                tls=tls,
            )

        super().__init__(pool(CONTROL_CONNECTIONS, CONTROL_READ_S))
        self._max_connections = max_connections
        self._data = pool(max_connections, timeout_s)
        self._parts = pool(CONTROL_CONNECTIONS, CONTROL_READ_S, token=None, tls=pinned.context)
        self._uploader = Uploader(self._control, self._parts, pinned, plain=transport is None)
        self._deltas: DeltaPushes | None = None
        self._table: tuple[UploadTensor, ...] = ()
        """Of the push before."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._data.aclose()
        await self._control.aclose()
        await self._parts.aclose()
        self._uploader.close()
        if self._deltas is not None:
            await self._deltas.settled()

    def session(self, session_id: str | None = None, *, ttl_s: float = 3600.0) -> AgentSession:
        """A conversation of an agent that chats by itself: ``async with client.session() as session:``.

        Args:
            session_id: Letters, digits and ``._:-``; None: the service makes one.
            ttl_s: The service forgets it so long after its last turn.
        """
        return AgentSession(self._control, OpenSession(session_id=session_id, ttl_s=ttl_s))

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        min_weight_version: int | str | None = None,
        session_id: str | None = None,
        priority: int = 0,
        on_abort: OnAbort = "continue",
        return_routed_experts: bool = False,
        routed_experts_prompt_start: int | None = None,
        add_special_tokens: bool | None = None,
        request_id: str | None = None,
    ) -> Rollout:
        """Sample ``n`` completions of one prompt, given as text or token ids. Parameters have vLLM's names and meaning.

        Sent again if its answer is surely lost (a connection that broke, a gateway that died), never after a timeout.

        Args:
            max_tokens: None: what the context leaves.
            top_p, top_k, min_p, min_tokens: Cut off a part of the vocabulary. Logprobs are renormalized over what is
                left, and the rollout is marked ``truncated_sampling``: see docs/correction.md before training on it.
            stop: Strings that end a completion; they need a tokenizer.
            min_weight_version: Sample from this weight version or one that was committed later; the service waits a
                while for it. By its number, or by its label, for which each request asks the ingest.
            session_id: Calls of one session go to one replica while it lives, whose prefix cache has what they share.
            priority: Lower is scheduled earlier.
            on_abort: When an update, a pause or a lost replica cuts a completion short: ``continue`` on another
                replica from the tokens it has, or ``return`` it with ``finish_reason="abort"``.
            return_routed_experts: Have ``Rollout.routed_experts`` say which experts each token went to, for a service
                with ``engine.return_routed_experts``.
            routed_experts_prompt_start: Only from this token of the prompt on: the last one that had no row after the
                turn before, where this prompt goes on from that.
            add_special_tokens: Whether the tokenizer adds special tokens to a prompt in text, such as a beginning of
                sequence. None: it does, but no second beginning of sequence to a text that begins with one.
            request_id: Name of this rollout in logs; the service makes one up otherwise.

        Raises:
            InvalidRequest: A parameter or token that the service does not take.
            TooEarly: No replica reached ``min_weight_version`` in time.
            NotFound: No version has that label.
            Overloaded, NotReady: Still, after all retries.
        """
        sampling = sampling_of(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            routed_experts_prompt_start=routed_experts_prompt_start,
        )
        request = request_of(
            prompt,
            sampling,
            min_weight_version=min_weight_version,
            session_id=session_id,
            priority=priority,
            on_abort=on_abort,
            return_routed_experts=return_routed_experts,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
        )
        reply = await self._data.send("POST", "/inference/v1/generate", json=body_of(request), repeat=Repeat.IF_LOST)
        return rollout_of(reply, request)

    def generate_stream(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[GenerateOptions]
    ) -> RolloutStream:
        """``generate``, read while it is made: ``async with client.generate_stream(prompt) as stream:``.

        ``async for piece in stream:`` yields a ``StreamPiece`` each time that tokens have come, of any of the
        completions; then ``stream.rollout`` is what ``generate`` would have returned. Leaving the block cancels what is
        left on the service, and ``stream.partial`` is what was read.

        Args:
            prompt: Text or token ids. Pieces of a prompt in text have text.
            request_id: As for ``generate``.
            **options: As for ``generate``.

        Raises:
            InvalidRequest: A parameter that the service does not take. All else is raised as the block is entered, or
                by the iteration.
        """
        given = dict(options)
        about = {name: given.pop(name) for name in _ABOUT_THE_REQUEST if name in given}
        request = request_of(prompt, sampling_of(**given), request_id=request_id, **about)
        return RolloutStream(self._data, request)

    async def detach(self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """Have ``generate`` done without waiting for it. Returns the id by which ``collect`` gets what it made.

        The service keeps it in the gateway's memory for an hour after its end. A trainer that restarts collects what it
        had asked for under names of its own (``request_id``).

        Args:
            prompt: Text or token ids.
            request_id: The id; None: the service makes one up.
            **options: As for ``generate``.

        Raises:
            InvalidRequest: A parameter or token that the service does not take.
            VersionConflict: There is one of that id.
            Overloaded: The service keeps too many.
        """
        given = dict(options)
        about = {name: given.pop(name) for name in _ABOUT_THE_REQUEST if name in given}
        request = request_of(prompt, sampling_of(**given), request_id=request_id, detach=True, **about)
        reply = await self._data.send(
            "POST", "/inference/v1/generate", json=body_of(request), repeat=Repeat.IF_NOT_ACCEPTED
        )
        return parse(DetachedRollout, reply).id

    async def collect(self, rollout_id: str, *, timeout_s: float | None = None) -> Rollout:
        """What a detached rollout made; it stays there until its time is over or ``discard_rollout``.

        Args:
            rollout_id: As ``detach`` returned it.
            timeout_s: Longest wait; None: as long as it takes.

        Raises:
            NotFound: There is none: its time is over, it was discarded, or the gateway that had it has ended.
            TimeoutError: It is not done in time; it goes on.
            RolloutServiceError: What ``generate`` would have raised.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                reply = await self._data.send("GET", _rollout_url(rollout_id), repeat=Repeat.IDEMPOTENT)
                if reply.status_code != 202:
                    return rollout_of(reply)

    async def discard_rollout(self, rollout_id: str) -> None:
        """End a detached rollout if it is under way, and have the service forget it."""
        await self._data.send("DELETE", _rollout_url(rollout_id), repeat=Repeat.IDEMPOTENT)

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
        """``generate`` for many prompts at once; rollouts in the order of the prompts.

        A prompt that the service refuses, or that fails on every replica, does not end the others: ``BatchFailed`` is
        raised when they are done, with their rollouts and with the error of each prompt that failed. Any other error
        cancels the rest, here and on the service.

        Args:
            prompts: Text, token ids, or what an earlier call handed back: such a group keeps the completions that have
                ended, and the others go on from their tokens, with the options of this call. ``max_tokens`` counts
                those tokens, too, and ``n`` is of new prompts only.
            until: Return as soon as so many groups (a prompt's ``n`` completions) are complete, as a ``PartialBatch``:
                those, and the rest as it is by then, to be carried on by a later call. The engines stop with the rest
                at once; what they made in the last 0.1 s or so, and had not told, they make again. Carry all of it
                on: short completions end first, and who drops the rest trains on those. Fewer groups come back where
                completions end "abort" (``on_abort="return"``, attempts used up), which are handed back as well.
            concurrency: Most requests at once; ``max_connections`` if None or more than that.
            progress: Called with (rollouts done, prompts) after each; with (groups complete, ``until``).
            **options: As for ``generate``, the same for all prompts. Not with ``until`` or partial rollouts:
                ``return_routed_experts``, ``routed_experts_prompt_start``.

        Raises:
            BatchFailed: Some prompts failed; it has the others' rollouts, and is of the class of its first error.
            InvalidRequest: An option that the service does not take, for any prompt.
        """
        waiting = _prompt_list(prompts)
        if until is not None and not 1 <= until <= len(waiting):
            raise ValueError(f"until={until} groups of {len(waiting)} prompts: give 1 to {len(waiting)}")
        given = dict(options)
        about = {name: given.pop(name) for name in _ABOUT_THE_REQUEST if name in given}
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least one request at a time is needed")
        most_requests = min(concurrency or self._max_connections, self._max_connections)
        sampling = sampling_of(**given)
        if until is not None:
            groups = [Group(self._data, prompt, sampling, about) for prompt in waiting]
            return await first_groups(groups, until, most_requests, progress)
        rollouts: dict[int, Rollout] = {}
        failures = Failures()
        queue = iter(enumerate(waiting))

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
                        progress(len(rollouts), len(waiting))

        with failures.noted():
            async with raise_first_failure() as group:
                for _ in range(min(most_requests, len(waiting))):
                    group.create_task(work())
        if failures.errors:
            first = next(iter(failures.errors.values()))
            raise BatchFailed.of(rollouts, {}, failures.errors, len(waiting)) from first
        return [rollouts[index] for index in range(len(waiting))]

    @overload
    def push_weights(
        self,
        version: NewVersion,
        named_tensors: NamedTensors,
        *,
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
        send: Literal[True] = True,
    ) -> Coroutine[object, None, WeightStatus]: ...

    @overload
    def push_weights(
        self,
        version: NewVersion,
        named_tensors: NamedTensors,
        *,
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
        send: bool,
    ) -> Coroutine[object, None, WeightStatus | None]: ...

    def push_weights(
        self,
        version: NewVersion,
        named_tensors: NamedTensors,
        *,
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
        send: bool = True,
    ) -> Coroutine[object, None, WeightStatus | None]:
        """Upload one weight version tensor by tensor, commit it, and wait until every live replica serves it.

        Tensors are bfloat16, float16 or float32 under Hugging Face's names, on any device; routed experts one by one
        or stacked as transformers 5 holds them. They must not change until this returns. Host memory needed beside
        them: the largest tensor and about ``parallel_parts + 1`` parts (16 MiB each unless the service is configured
        otherwise). Contiguous ones on the CPU, if ``named_tensors`` is no iterator, need none; of others there, which
        are copied as a whole, the last two may be in memory at once.

        With FSDP, each ``DTensor`` is gathered when its turn comes, which is a collective: call this on every rank of
        the mesh with the same tensors, and ``send=rank == 0``; run no other collective there meanwhile. If sending
        fails, rank 0 still takes part in the gathers that are left before it raises, so that no other rank hangs;
        tell the others about the failure yourself.

        A push of a number that failed may be repeated: parts that this client has sent already are not sent again, and
        VersionConflict says so if their bytes have changed since.

        Args:
            version: A number larger than any before, such as the trainer's step. Or ``"next"``: the service gives it
                the next number, which stands in the reply, whatever the trainer's own count: that one goes back when a
                training resumes from an older checkpoint.
            label: What the trainer calls it, such as ``run-7/step-300``: letters, digits and ``._:/@+=-``, at most 128,
                of them at least one letter. Replies show it beside the number, and ``min_weight_version`` takes either.
                Of several versions with one label the newest is meant. A push of ``"next"`` that failed, repeated under
                its label, has the same number, also after a restart of the trainer, and goes on where it was; parts
                whose bytes have changed since are replaced.
            named_tensors: A module (its ``state_dict``), a mapping, or pairs. A generator is consumed once, one
                tensor at a time, if ``tensor_table`` is given. Without, it is first read to its end to learn names
                and shapes: parameters and ``DTensor`` are held as they are, other tensors are copied to host memory.
                A generator may fill one buffer anew for each tensor, except for parameters that it yields without a
                table: ValueError then names one that was overwritten, and nothing is committed.
            tensor_table: What the generator will yield, in that order.
            quantize: ``service``: send tensors as they are. ``trainer``: quantize them here, on the device they are
                on, and send codes and scales: the same version, byte for byte, in half the bytes. Up to 256 MiB of
                tensors are quantized at once; those of a generator are copied for that. None: ``trainer`` for a
                ``delta``, otherwise ``service``.
            transport: ``shared_memory``: through memory that this process and the ingest share, which they can on one
                machine, as one user and outside of separate containers. It holds 1 GiB, or 512 MiB beside the largest
                tensor if that is more, and is kept for the next push. ``cuda_ipc``: likewise through memory of this
                process's current GPU, 1.5 GiB or 768 MiB beside the largest tensor; the ingest needs a GPU, too
                (``weights.ingest_num_gpus``), the same one or one that reaches it. Of tensors on a GPU this is the
                faster one. ``http``: in parts, which outlive the ingest.
                ``delta``: quantize here, and send, in parts, what has changed since the last push of this client with
                ``delta``: the same version, byte for byte, in less than 1% of the bytes after one step of RL. For that
                the client keeps what it has sent in the host's memory, as many bytes as the version has (of tensors on
                a GPU pinned, up to a third more), and takes up to 512 MiB while it compares, there or on that GPU; such
                pushes of one client wait for each other. All is sent by the first one, and where the service does not
                have the last one any more, or more than an eighth of the bytes changes.
                ``auto``: of 256 MiB and more through ``cuda_ipc`` if the tensors are on a GPU that has room for it,
                else through ``shared_memory``, where that can be, which the first push finds out. Where it cannot be, a
                client that quantizes (``quantize="trainer"``) sends deltas from its third push on: the second one is
                kept, if it needs no more than half of the host's free memory. Once more than an eighth of the bytes has
                changed from one push to the next, this client sends all from then on, and keeps nothing. Everything
                else goes over ``http``.
            kv_scales: Scales of an FP8 KV cache for these weights, from ``rollout_service.kv_scales``; they are part
                of the version. None: ``kv_cache.scales_policy`` of the service says which it gets.
            mode: What happens to rollouts that are running, see ``CommitUpload.mode``.
            wait: ``all``: return once every live replica serves this version. ``durable``: once it outlives the
                service's machine, whoever serves it by then; with ``weights.durability: behind`` that is later.
                ``none``: once it is committed.
            timeout_s: How long ``wait`` waits.
            parallel_parts: Uploads at once, each by a thread and a connection of its own.
            progress: Called with (bytes that the service has, bytes of all) after each part; of a ``delta``, bytes of
                tensors of which it knows what has changed.
            send: False: only take part in the gathers, and return None.

        Raises:
            ValueError: A tensor of another dtype, a name that comes twice, or tensors that differ from the table.
            InvalidManifest: Names or shapes are not the served model's, or KV scales not those of its layers.
            QuantizationError: A weight is NaN or infinite. Nothing is committed.
            VersionConflict: The version is not newer than the newest, or was uploaded with other bytes.
            NotShared: With ``transport="shared_memory"`` or ``"cuda_ipc"``, the ingest cannot reach this process's
                memory, and why.
            CommitTimeout: Committed, but some replica was not live in time: ``detail`` says which. Or it was not
                durable.
            InvalidRequest: ``wait="durable"`` where the log is in memory alone. Nothing is committed.
        """
        # Not a coroutine function: SyncRolloutClient runs this part in the caller's thread, whose CUDA stream counts.
        if parallel_parts < 1:
            raise ValueError(f"parallel_parts={parallel_parts}: at least one upload at a time is needed")
        if quantize is not None and quantize not in get_args(Quantize):
            raise ValueError(f"quantize={quantize!r}: the service or the trainer quantizes, say which")
        if transport not in get_args(Transport):
            raise ValueError(f"transport={transport!r}: it is one of {', '.join(get_args(Transport))}")
        if transport == "delta" and quantize == "service":
            raise ValueError(
                "quantize='service' and transport='delta' contradict each other: what changed is told from what was "
                "stored, so a delta is quantized by the trainer; leave quantize out"
            )
        commit = CommitUpload(mode=mode, wait=wait, timeout_s=timeout_s)
        thread, scales = TensorThread(), named_scales(kv_scales)

        async def push() -> WeightStatus | None:
            try:
                source = await thread.call(TensorSource, named_tensors, tensor_table, self._table)
                self._table = source.table
                if not send:
                    await thread.call(drain, source)
                    return None
                if transport == "delta" or (
                    transport == "auto" and quantize == "trainer" and self._delta_is_better(source)
                ):
                    return await self._push_delta(
                        version, source, thread, commit, label, scales, parallel_parts, progress
                    )
                number, sent = await self._uploader.send_tensors(
                    version, source, thread, label=label, quantize=quantize or "service", transport=transport,
                    kv_scales=scales, parallel_parts=parallel_parts, progress=progress,
                )  # fmt: skip
            finally:
                thread.close()
            return await self._uploader.commit(number, commit.model_copy(update={"upload_digest": sent}))

        return push()

    async def _push_delta(
        self,
        version: NewVersion,
        source: TensorSource,
        thread: TensorThread,
        commit: CommitUpload,
        label: str | None,
        kv_scales: dict[str, float] | None,
        parallel_parts: int,
        progress: Progress | None,
    ) -> WeightStatus:
        from rollout_service.client._delta import Push  # needs torch

        push = Push(self._uploader, thread, commit, parallel_parts, progress)
        return await self._delta_pushes().push(push, version, source, label, kv_scales)

    def _delta_pushes(self) -> DeltaPushes:
        from rollout_service.client._delta import DeltaPushes  # needs torch

        if self._deltas is None:
            self._deltas = DeltaPushes()
        return self._deltas

    def _delta_is_better(self, source: TensorSource) -> bool:
        large = sum(tensor.nbytes for tensor in source.table) >= LEAST_SHARED_BYTES
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
        """Make a version of a Hugging Face folder that the service reads itself; otherwise like ``push_weights``.

        ``path`` must lie below one of the service's ``weights.source_roots``. Raises Forbidden if it does not.
        """
        commit = CommitUpload(mode=mode, wait=wait, timeout_s=timeout_s)
        source = PathSource(path=Path(path).absolute())
        scales = named_scales(kv_scales)
        plan = await self._uploader.begin(announcement(version, source=source, kv_scales=scales, label=label))
        return await self._uploader.commit(plan.version, commit)

    async def rollback(
        self,
        to: int | str,
        *,
        mode: PauseMode = "keep",
        wait: WaitFor = "all",
        timeout_s: float = 600.0,
    ) -> WeightStatus:
        """Make an older version the newest again, under a new number, and wait until every live replica serves it.

        Nothing is uploaded, and where the log's file system has hard links, nothing copied. The new version has the
        label of the old one. If the newest version has these weights already, it is returned as it is.

        Args:
            to: A version that the service keeps (``weights()`` lists them), by number or label.
            mode, wait, timeout_s: As for ``push_weights``.

        Raises:
            NotFound: No such version, or it is not on disk any more: the error names those that are.
            LogCorrupt: Its files are damaged.
            CommitTimeout: It is the newest, but some replica was not live, or it was not durable, in time.
        """
        return await self._uploader.roll_back(RollBack(to=to, mode=mode, wait=wait, timeout_s=timeout_s))


def _prompt_list(prompts: Iterable[Prompt | PartialRollout]) -> list[Prompt | PartialRollout]:
    if isinstance(prompts, str):
        raise TypeError("prompts is one str: put it in a list, or call generate()")
    return list(prompts)
