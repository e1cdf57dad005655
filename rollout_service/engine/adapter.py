"""The service's interface to vLLM: start, generate, pause, load a version, check health.

A version that fails between ``start`` and ``finish`` leaves parameters half loaded. A retry cannot repair this, because
a later update may put unquantized weights into the kernels' tensors. The engine is then ``broken``: it answers no
calls, its health check fails, and the replica is replaced.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import safe_open
from vllm import AsyncEngineArgs, RequestOutput, SamplingParams, envs
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rollout_service.compat.vllm_internals import environment_as_it_is, pause_scheduler, tokens_since
from rollout_service.compat.vllm_scheduler import KV_MAX_AGE, begin_version
from rollout_service.engine.adapters import LoadedAdapter
from rollout_service.engine.kv_versions import KVVersions
from rollout_service.engine.load_statistics import RayStats, SchedulerLog
from rollout_service.engine.loading.staging_calls import StageCall, stage_at
from rollout_service.engine.partial_penalties import with_partial_penalties
from rollout_service.errors import (
    Asleep,
    EngineFailed,
    InvalidManifest,
    InvalidRequest,
    LogCorrupt,
    MemoryTaken,
    NonFiniteLogprob,
)
from rollout_service.fleet.continuation import of_version
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.adapters import TENSORS_FILE
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.fleet import PauseMode, Staging
from rollout_service.protocol.kv_scales import KVMeasurement
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, PromptCandidates, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import Reasoning, Sampling, Scoring
from rollout_service.protocol.sampling_mask import pack

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 1800.0
"""Maximum seconds for loading a version. The health check fails after that, and Serve replaces the replica."""


class CoreWatch:
    """Asks the engine core a question again and again, to notice one that hangs: it lives, and answers nothing."""

    def __init__(self, ask: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the watch. ``ask``: returns when the core has answered. ``clock``: in seconds."""
        self._ask, self._clock = ask, clock
        self._question: asyncio.Task[None] | None = None
        self._since = 0.0

    def silent_s(self, excused: bool) -> float:
        """Return for how many seconds the core has not answered, and ask it again if it has.

        ``excused``: True while the core cannot answer; the time starts anew afterwards.
        """
        now = self._clock()
        if self._question is None or self._question.done():
            self._question, excused = asyncio.create_task(self._until_answered()), True
        if excused:
            self._since = now
        return now - self._since

    async def _until_answered(self) -> None:
        with suppress(Exception):  # a refusal is an answer; vLLM reports a dead process elsewhere
            await self._ask()


class EngineAdapter:
    """One vLLM engine. Construct it inside the event loop that will use it; construction takes tens of seconds."""

    def __init__(self, args: AsyncEngineArgs, *, exports: bool = True) -> None:
        """Start the engine.

        Args:
            args: vLLM's arguments.
            exports: False to omit vLLM's metrics, for an engine that serves no requests.
        """
        self.scheduler = SchedulerLog()
        """The scheduler statistics of the last step."""
        loggers = [lambda _config, _index: self.scheduler, *([RayStats] if exports else [])]
        with environment_as_it_is():
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        self.staging: Staging | None = None
        """Memory type of the workers' staging buffers. None before ``connect``."""
        self.attention_backends: tuple[str, ...] = ()
        """See ``AttentionStatus``; empty before ``connect``."""
        self._staging_addresses: tuple[str, ...] = ()
        self._half_loaded: str | None = None
        self._has_loaded = False
        self._loading_since = math.inf
        self._core = CoreWatch(self._llm.is_paused)
        self._generating: set[asyncio.Task[RequestOutput]] = set()
        self._exact: dict[str, int] = {}
        """Running requests that accept tokens of one weight version only, with that version."""
        self._adapters: dict[str, LoadedAdapter] = {}
        """Running requests with an adapter."""
        self._adapter_targets: frozenset[str] | None = None
        """The layers that compute with adapters, by the last part of their names; None: not asked yet."""
        self._memory, self._asleep = asyncio.Lock(), False
        """Lock of the memory against being released while an adapter is written to it, and whether it is released."""
        self._has_kv = True
        """False if the KV cache was dropped, and nothing ran since."""
        settings = args.additional_config
        self._kv = KVVersions(settings[KV_MAX_AGE]) if KV_MAX_AGE in settings else None
        """None: every update drops the cache."""

    @property
    def broken(self) -> str | None:
        """The reason why the engine must be replaced. None: it is sound."""
        return "the engine's process is dead" if self._llm.errored else self._half_loaded

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        cache = self._llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size

    async def ask_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of ``engine/worker.py`` on each worker. Returns the answers by rank; raises the worker's
        error."""
        answers: list[Any] = await self._llm.collective_rpc(method, args=args)
        return answers

    async def kv_reads(self) -> tuple[int, int]:
        """Return the KV tokens that decode steps attended to in grouped batches, and the tokens saved by grouping.

        Counts one layer, up to the previous call. A saved token was read once for several sequences.
        """
        (attended, spared), *_ = await self.ask_workers("kv_reads")  # each rank groups the same batches
        return attended, spared

    async def label(self, version: int) -> None:
        """Set the version number of the loaded weights, for example of dummy weights without a number."""
        await self._llm.update_weight_version(str(version))

    async def connect(self) -> None:
        """Prepare the weight-transfer engine in the workers, and run two steps on the dummy weights."""
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        (self.staging, why), *_ = await self.ask_workers("staging_kind")
        self._staging_addresses = tuple(await self.ask_workers("staging_address"))
        self.attention_backends = tuple((await self.ask_workers("attention_backends"))[0])
        if why is not None:
            logger.log(logging.WARNING if self.staging == "none" else logging.INFO, "%s", why)
        # the first forward passes compile and allocate for seconds; no rollout should wait for them
        top_k = int(self._llm.vllm_config.model_config.return_sampling_mask)  # an engine with masks refuses 0
        warm_up = Sampling(max_tokens=2, ignore_eos=True, top_k=top_k)
        async for _ in self._stream("warm-up", (0,), vllm_sampling(warm_up)):
            pass

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        priority: int = 0,
        cache_salt: str | None = None,
        reasoning: Reasoning | None = None,
        partial_tokens: int = 0,
        exact_version: int | None = None,
        session_id: str | None = None,
        note_cached: Callable[[int], None] | None = None,
        adapter: LoadedAdapter | None = None,
        scoring: Scoring | None = None,
    ) -> tuple[Completion, ...]:
        """Return the ``n`` completions of one prompt. Cancelling the call aborts them in the engine.

        ``partial_tokens``, ``session_id``, ``scoring``: see ``GenerateCall``. ``exact_version``: the only weight
        version whose tokens are returned. A completion that another version would continue ends with "abort". Such a
        request reads no keys and values of its session's earlier versions. ``note_cached``: called with the number of
        the prompt's tokens that the prefix cache had. ``adapter``: samples the tokens; None: the model itself.

        Raises EngineFailed if the engine is dead or broken, InvalidRequest if vLLM refuses the request, and
        NonFiniteLogprob.
        """
        if sampling.routed_experts_prompt_start is not None and not self._llm.vllm_config.aux_output_config.enabled:
            raise InvalidRequest("routed experts are asked for, and engine.return_routed_experts is not set")
        parameters = vllm_sampling(sampling, len(prompt), partial_tokens, scoring)
        if exact_version is not None:
            self._exact[request_id], session_id = exact_version, None
        if adapter is not None:
            self._adapters[request_id] = adapter
        kv = nullcontext(cache_salt) if self._kv is None else self._kv.follow(request_id, session_id, cache_salt)
        try:
            with kv as salt:
                stream = self._stream(request_id, prompt, parameters, priority, salt, reasoning, adapter)
                made = completions(await self._output(request_id, stream, note_cached), sampling, scoring)
                return tuple(self._with_versions(request_id, made))
        finally:
            self._exact.pop(request_id, None)
            self._adapters.pop(request_id, None)

    def _with_versions(self, request_id: str, made: Iterable[Completion]) -> Iterable[Completion]:
        """Return a running request's completions with ``kv_from`` and the adapter in their spans, up to its exact
        version's last token."""
        if self._kv is not None:
            made = self._kv.on(request_id, made)
        if (adapter := self._adapters.get(request_id)) is not None:
            made = [each.with_adapter(adapter.adapter.name, adapter.adapter.version) for each in made]
        exact = self._exact.get(request_id)
        return made if exact is None else [of_version(each, exact) for each in made]

    def tokens_since(self, request_id: str, since: Sequence[int], candidates: int = 0) -> list[Completion]:
        """Return the new tokens of each completion of a running call: those after its first ``since[index]`` tokens.

        Spans count from the first returned token. ``finish_reason`` is "abort" for a running completion. A completion
        that has ended is returned each time until the call ends. Returns nothing for a call that has ended, or for a
        completion that ``generate`` will raise an error for.

        ``candidates``: the call's ``sampling.logprobs``.
        """
        made = []
        for output in tokens_since(self._llm, request_id, since):
            goes_on = output.finish_reason is None
            try:
                made.append(completion(replace(output, finish_reason="abort") if goes_on else output, candidates))
            except (EngineFailed, NonFiniteLogprob):
                continue
        return list(self._with_versions(request_id, made))

    async def _output(
        self,
        request_id: str,
        stream: AsyncGenerator[RequestOutput],
        note_cached: Callable[[int], None] | None = None,
    ) -> RequestOutput:
        """Return the last output of a stream. vLLM starts the request when the stream is first awaited."""
        self._require_sound()
        task = asyncio.create_task(self._collect(request_id, stream), name=request_id)
        self._generating.add(task)
        task.add_done_callback(self._generating.discard)
        try:
            output = await task
            if note_cached is not None:
                note_cached(output.num_cached_tokens or 0)
            return output
        except asyncio.CancelledError:
            if self._half_loaded is None or _cancelled_by_caller():
                raise
        raise EngineFailed(f"{request_id} was under way when {self._half_loaded}")

    @staticmethod
    async def _collect(request_id: str, stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
        final: RequestOutput | None = None
        try:
            async for output in stream:
                final = output  # the only output, with FINAL_ONLY
        except EngineDeadError as error:
            raise EngineFailed(f"the engine died while it generated {request_id}: retry") from error
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequest(str(error)) from error
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            raise InvalidRequest(str(error.__cause__)) from error  # vLLM raises plain ValueError for some refusals
        if final is None:
            raise EngineFailed(f"the engine ended {request_id} without an answer")
        return final

    def _stream(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        reasoning: Reasoning | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        thinking: dict[str, Any] = {} if reasoning is None else {"reasoning_ended": reasoning.ended}
        if reasoning is not None and reasoning.parser_kwargs:
            thinking["reasoning_parser_kwargs"] = reasoning.parser_kwargs
        return self._llm.generate(
            tokens_input(list(prompt), cache_salt=cache_salt),
            sampling,
            request_id,
            priority=priority,
            lora_request=None if adapter is None else _lora_request(adapter),
            **thinking,
        )

    async def add_adapter(self, loaded: LoadedAdapter) -> None:
        """Load an adapter while the engine serves. Raises InvalidManifest if vLLM cannot load it, Asleep, or
        EngineFailed."""
        self._require_sound()
        try:
            if self._adapter_targets is None:
                self._adapter_targets = frozenset((await self.ask_workers("adapter_targets"))[0])
            # vLLM ignores matrices of a layer that has no adapters
            if missing := await asyncio.to_thread(_targets_of, loaded) - self._adapter_targets:
                raise InvalidManifest(f"vLLM has no LoRA for {sorted(missing)}: leave them out of target_modules")
            async with self._memory:
                if self._asleep:  # vLLM would write to unmapped memory
                    raise Asleep(f"adapter {loaded.adapter} is not loaded: the engine is asleep; POST /wake_up")
                await self._llm.add_lora(_lora_request(loaded))
        except (Asleep, InvalidManifest, OSError):
            raise
        except EngineDeadError as error:
            raise EngineFailed("the engine's process is dead") from error
        except Exception as error:  # vLLM raises a plain Exception with the worker's message
            raise InvalidManifest(f"vLLM cannot load adapter {loaded.adapter}: {error}") from error

    async def remove_adapter(self, loaded: LoadedAdapter) -> None:
        """Remove an adapter that no request uses."""
        self._require_sound()
        await self._llm.remove_lora(loaded.number)

    async def abort(self) -> None:
        """End every running completion with its tokens so far, in any engine state. They end with "abort"."""
        if self.broken is None:
            await self._llm.abort([task.get_name() for task in self._generating])

    async def pause(self, mode: PauseMode, clear_cache: bool = True) -> None:
        """Stop scheduling, see ``PauseMode``. ``clear_cache``: drop the KV cache, so that later steps do not use it.

        ``wait`` returns when the last running request has finished, or when another pause replaces this one. If
        cancelled, the engine refuses new requests until ``resume`` or another pause.
        """
        if clear_cache and mode == "keep":
            self.scheduler.drop_cache()
        if mode == "wait":
            self._fill_kv()
        await pause_scheduler(self._llm, mode, clear_cache)
        if clear_cache:
            self._has_kv = False

    async def resume(self) -> None:
        """Resume scheduling. Raises EngineFailed if broken, because a half-loaded version must not be served."""
        self._require_sound()
        self._fill_kv()
        await self._llm.resume_generation()

    def _fill_kv(self) -> None:
        """Record that requests run from now on, and write keys and values."""
        if not self._has_kv and self._kv is not None:
            self._kv.emptied()
        self._has_kv = True

    async def stage(self, folder: Path, digest: str | None = None) -> None:
        """Read and check a committed version into the workers' staging buffers, while the engine serves.

        When this returns, every byte of the version was checked. A version that does not fit into a staging buffer is
        loaded from its files later, with a warning.

        Args:
            folder: the version's folder in the log.
            digest: the digest of the expected manifest.

        Raises:
            LogCorrupt: Names tensor, chunk and file.
            EngineFailed: The engine is dead, or a worker failed otherwise.
        """
        self._require_sound()
        try:
            call = StageCall(folder=str(folder), digest=digest)
            answers = await asyncio.gather(*(stage_at(address, call) for address in self._staging_addresses))
        except (OSError, ValidationError) as error:
            raise EngineFailed(f"{folder} could not be staged: {error}") from error
        for rank, answer in enumerate(answers):
            if answer.failed is not None:
                raise EngineFailed(f"rank {rank} could not stage {folder}: {answer.failed}")
            if answer.corrupt is not None:
                raise LogCorrupt(*answer.corrupt)
            if answer.refused is not None:
                # a tensor-parallel engine's first version always exceeds the buffer: each rank learns its shard from it
                level = logging.WARNING if self._has_loaded else logging.INFO
                logger.log(level, "rank %d loads %s layer by layer from its files: %s", rank, folder, answer.refused)

    async def load(self, folder: Path, version: int, keep_cache: bool = False) -> float:
        """Load a committed version while paused, and return the seconds it took. Any failure leaves the engine broken.

        Requests wait in the engine during the load, as in any pause. Those that accept another version only are
        aborted.

        Args:
            folder, version: the version.
            keep_cache: keep the KV cache if the engine can, except for requests beyond ``weights.kv_max_age``. The
                scales must be those of the loaded version, and the number above its number.
        """
        self._require_sound()
        self._loading_since = started = time.perf_counter()
        try:
            # a request that vLLM does not know yet is missed here; its tokens of this version are cut off later
            await self._llm.abort([name for name, exact in self._exact.items() if exact != version])
            await self._begin_kv(version, keep_cache)
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"folder": str(folder)}))
            await self._llm.finish_weight_update(weight_version=str(version))
            self._has_loaded = True
        except BaseException as error:
            record(table.UPDATES, outcome="failed")
            failed = self._is_lost(f"loading version {version} failed", error)
            if not isinstance(error, Exception):  # cancelled
                raise
            raise failed from error
        finally:
            self._loading_since = math.inf
        return time.perf_counter() - started

    def bound_kv_age(self, max_age: int) -> None:
        """Set the maximum age of kept keys and values for the next load, in versions."""
        if self._kv is not None:
            self._kv.max_age = max_age

    async def _begin_kv(self, version: int, keep_cache: bool) -> None:
        """Drop the keys and values that ``version`` must not read. Call while paused."""
        if self._kv is None or not keep_cache:
            await self._drop_kv()
        if self._kv is not None:
            self._kv.load(version, is_empty=not self._has_kv)  # before the await: requests may arrive then
            await begin_version(self._llm, version, self._kv.max_age)

    async def _drop_kv(self) -> None:
        if self._has_kv:
            self.scheduler.drop_cache()
            await self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self._has_kv = False

    async def measure_kv(
        self, sequences: list[list[int]], scales: dict[str, float] | None = None
    ) -> tuple[KVMeasurement, ...]:
        """Return statistics of q, k and v on each rank, from a forward pass separate from all requests. Call while
        paused.

        ``scales``: see ``kv_scales/worker.py``. Raises EngineFailed, or InvalidRequest if no engine can measure it.
        """
        self._require_sound()
        try:
            ranks = await self.ask_workers("measure_kv", sequences, scales)
        except Exception as error:
            raise EngineFailed(
                f"keys and values could not be measured: {error}; set kv_cache.dtype: bfloat16 if that happens again"
            ) from error
        for rank in ranks:
            if isinstance(rank, str):
                raise InvalidRequest(rank)
        return tuple(KVMeasurement.model_validate(rank) for rank in ranks)

    async def sleep(self) -> tuple[int, ...]:
        """Release the memory of weights, staging buffer and KV cache. Call while paused, with no running requests.

        Requests wait in the engine, as in any pause. Returns the released bytes of each rank. A failure leaves the
        engine broken and raises EngineFailed.
        """
        self._require_sound()
        started = time.perf_counter()
        try:
            await self._drop_kv()  # a pause may have kept it
            async with self._memory:
                dropped = tuple(await self.ask_workers("drop_memory"))
                self._asleep = True
        except Exception as error:
            raise self._is_lost("giving memory back failed", error) from error
        gib = ", ".join(f"{nbytes / 2**30:.1f}" for nbytes in dropped)
        logger.info("asleep in %.2f s: %s GiB given back, by rank", time.perf_counter() - started, gib)
        return dropped

    async def wake_up(self) -> None:
        """Reallocate the memory. It holds no weights until the next ``stage`` and ``load``.

        Raises MemoryTaken if another process uses the memory; the engine then stays asleep. Any other failure leaves
        the engine broken and raises EngineFailed.
        """
        self._require_sound()
        started = time.perf_counter()
        try:
            missing = await self.ask_workers("missing_memory")
            for rank, (needed, free) in enumerate(missing):
                if needed:
                    raise MemoryTaken(
                        f"rank {rank} needs {needed} bytes of GPU memory to wake up, and {free} are free: free what "
                        "the trainer holds there, or lower engine.gpu_memory_utilization",
                        {"rank": rank, "needed_bytes": needed, "free_bytes": free},
                    )
            await self.ask_workers("take_memory")
            self._asleep = False
        except MemoryTaken:
            raise
        except Exception as error:
            raise self._is_lost("taking memory failed", error) from error
        logger.info("awake in %.2f s, without weights yet", time.perf_counter() - started)

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine is dead or broken, if its core hangs, or if loading a version takes too
        long."""
        self._require_sound()
        loading_s = time.perf_counter() - self._loading_since
        if loading_s > LOAD_LIMIT_S:
            raise EngineFailed(
                f"a version has been loading for {loading_s:.0f} s, more than {LOAD_LIMIT_S:g} s: this replica is "
                "replaced; look at the file system of weights.root"
            )
        # the core answers between two steps; each step calls the workers twice, and vLLM bounds each call
        limit_s = 2 * envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        # a load blocks the core, and has its own limit
        silent_s = self._core.silent_s(excused=loading_s > 0)
        if silent_s > limit_s:
            raise EngineFailed(
                f"the engine core has not answered for {silent_s:.0f} s, more than {limit_s} s: this replica is "
                "replaced; a step that takes longer needs engine.env.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
            )
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineFailed("the engine's process is dead") from error

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._llm.shutdown()

    def _is_lost(self, what: str, error: BaseException) -> EngineFailed:
        """Mark the engine as broken, and cancel the calls that wait in it."""
        self._half_loaded = f"{what}: {str(error) or type(error).__name__}"
        for task in self._generating:
            task.cancel()
        return EngineFailed(self._half_loaded)

    def _require_sound(self) -> None:
        if self.broken is not None:
            raise EngineFailed(f"this replica is being replaced: {self.broken}")


def _lora_request(loaded: LoadedAdapter) -> LoRARequest:
    # keys of the prefix cache contain the name, and a removed adapter's name and version may be given again
    name = f"{loaded.adapter}:{loaded.adapter.digest}"
    return LoRARequest(lora_name=name, lora_int_id=loaded.number, lora_path=str(loaded.folder))


def _targets_of(loaded: LoadedAdapter) -> set[str]:
    with safe_open(loaded.folder / TENSORS_FILE, framework="pt") as reader:
        return {name.partition(".lora_")[0].rpartition(".")[2] for name in reader.keys()}  # noqa: SIM118


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_NOT_VLLMS = {"stop", "stop_token_ids", "logprobs", "structured_outputs", "routed_experts_prompt_start"}
"""The sampling parameters that vLLM takes in another format or not at all."""


def vllm_sampling(
    sampling: Sampling, prompt_tokens: int = 0, partial_tokens: int = 0, scoring: Scoring | None = None
) -> SamplingParams:
    """Return vLLM's sampling parameters, for a single output when all completions have ended.

    An engine that records routed experts returns them with every completion. If the request does not ask for them,
    those of the prompt are left out.

    Raises InvalidRequest if vLLM refuses the parameters.

    Args:
        sampling: the request's sampling parameters.
        prompt_tokens: length of the prompt in tokens.
        partial_tokens, scoring: see ``GenerateCall``.
    """
    experts_from = sampling.routed_experts_prompt_start
    parameters = sampling.model_dump(exclude=_NOT_VLLMS | {"detokenize", "output_kind", "extra_args"})
    parameters |= with_partial_penalties(sampling, partial_tokens)
    parameters |= _targets(scoring)
    try:
        return SamplingParams(
            **parameters,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=sampling.logprobs or 0,
            structured_outputs=_structured_outputs(sampling),
            routed_experts_prompt_start=prompt_tokens if experts_from is None else experts_from,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, VLLMValidationError) as error:
        raise InvalidRequest(str(error)) from error


def _targets(scoring: Scoring | None) -> dict[str, object]:
    """Return vLLM's parameters for the logprobs of target tokens, in rows of one length: -1 is none."""
    if scoring is None or scoring.target_token_ids is None:
        return {}
    width = max(1, *map(len, scoring.target_token_ids))
    rows = [[*row, *[-1] * (width - len(row))] for row in scoring.target_token_ids]
    # vLLM counts from the token that predicts the first one
    return {"prompt_logprob_token_ids": np.array(rows, np.int32), "prompt_logprob_start": scoring.start - 1}


def _structured_outputs(sampling: Sampling) -> StructuredOutputsParams | None:
    wanted = sampling.structured_outputs
    if wanted is None:
        return None
    fields = wanted.model_dump(by_alias=True, exclude_none=True)
    return StructuredOutputsParams(**{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()})


_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def completions(output: RequestOutput, sampling: Sampling, scoring: Scoring | None = None) -> tuple[Completion, ...]:
    """Return vLLM's final output as this service's completions.

    Raises InvalidRequest if vLLM could not follow the requested structure, which it reports as finish reason "error".
    Raises the errors of ``completion``.
    """
    if sampling.structured_outputs is not None and any(each.finish_reason == "error" for each in output.outputs):
        asked = sampling.structured_outputs.model_dump_json(exclude_none=True)
        raise InvalidRequest(f"vLLM cannot make what {asked} describes")
    made = tuple(completion(each, sampling.logprobs or 0) for each in output.outputs)
    if (experts_from := sampling.routed_experts_prompt_start) is not None:
        tokens = len(output.prompt_token_ids or ())
        made = tuple(
            each.model_copy(update={"routed_experts": routed_experts(told, experts_from, tokens)})
            for each, told in zip(made, output.outputs, strict=True)
        )
    if scoring is not None:
        was_cut = any(each.finish_reason == "abort" for each in made)
        return made if was_cut else tuple(each.model_copy(update={"scores": scores(output, scoring)}) for each in made)
    if sampling.prompt_logprobs is None:
        return made
    of_the_prompt = prompt_candidates(output)
    return tuple(each.model_copy(update={"prompt_logprobs": of_the_prompt}) for each in made)


def completion(output: CompletionOutput, candidates: int = 0) -> Completion:
    """Return one vLLM completion in this service's format. ``candidates``: number of requested top logprobs.

    Raises NonFiniteLogprob, or EngineFailed for an unknown finish reason.
    """
    if output.finish_reason not in _FINISH:
        raise EngineFailed(f"vLLM ended a completion with finish_reason={output.finish_reason!r}")
    logprobs = sampled_logprobs(output)
    return Completion(
        index=output.index,
        token_ids=tuple(output.token_ids),
        logprobs=logprobs,
        finish_reason=_FINISH[output.finish_reason],
        stop_reason=output.stop_reason,
        spans=tuple(Span(version=int(s.version), start=s.start, end=s.end) for s in output.weight_versions or ()),
        top_logprobs=top_logprobs(output) if candidates else None,
        packed_sampling_mask=packed_mask(output),
    )


def packed_mask(output: CompletionOutput) -> tuple[str, ...] | None:
    """Return the packed sampling mask, or None if the engine returns none. Raises EngineFailed if some tokens have
    none."""
    mask = output.sampling_mask
    if mask is None:
        return None
    if len(mask.token_ids) != len(output.token_ids):
        raise EngineFailed(
            f"vLLM returned sampling masks of {len(mask.token_ids)} tokens for a completion of {len(output.token_ids)}"
        )
    return (pack(mask.token_ids),)


def routed_experts(output: CompletionOutput, start: int, prompt_tokens: int) -> RoutedExperts | None:
    """Return the routed experts of tokens from ``start`` on, counted from the prompt's first. None without tokens.

    Raises EngineFailed if vLLM returned none, or more than there are tokens. Raises InvalidRequest if all are zero: a
    router never chooses an expert twice for a token. Zeros mean that the kernel does not report its choice, so another
    replica would not help.
    """
    if not output.token_ids:
        return None
    experts, read = output.routed_experts, prompt_tokens + len(output.token_ids) - 1 - start
    if experts is None:
        raise EngineFailed(f"vLLM told no routed experts with a completion of {len(output.token_ids)} tokens")
    if len(experts) > read:
        raise EngineFailed(f"vLLM told routed experts of {len(experts)} tokens, where {read} were read from {start} on")
    if experts.size and experts.shape[-1] > 1 and not experts.any():
        raise InvalidRequest(
            f"vLLM told expert 0 for all {experts.shape[-1]} choices of {len(experts)} tokens in every layer: the "
            "kernel for this model's experts does not tell what it chose. Set engine.return_routed_experts: false"
        )
    return RoutedExperts.of(experts, start)


def sampled_logprobs(output: CompletionOutput) -> tuple[float, ...]:
    """Return the natural-log probability of each sampled token, which is entry 0 of its position."""
    flat = output.logprobs
    if not isinstance(flat, FlatLogprobs):
        raise EngineFailed(f"vLLM returned logprobs as {type(flat).__name__}, not FlatLogprobs")
    values = tuple(flat.logprobs[start] for start in flat.start_indices)
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteLogprob(
                f"token {position} of completion {output.index} has logprob {value}: the weights are likely broken",
                {"position": position, "token_id": output.token_ids[position]},
            )
    return values


def top_logprobs(output: CompletionOutput) -> tuple[tuple[Candidate, ...], ...]:
    """Return the top logprobs of each position, without vLLM's leading entry for the sampled token. Tokens that could
    not be sampled have no finite logprob and are left out."""
    flat = output.logprobs
    every = [
        Candidate(token, logprob, rank or 0)
        for token, logprob, rank in zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True)
    ]
    positions = zip(flat.start_indices, flat.end_indices, strict=True)
    return tuple(tuple(each for each in every[s + 1 : e] if math.isfinite(each.logprob)) for s, e in positions)


def scores(output: RequestOutput, scoring: Scoring) -> CompactLogprobs:
    """Return the logprobs of the prompt's tokens. Raises NonFiniteLogprob, or EngineFailed if vLLM returned none."""
    if scoring.target_token_ids is None:
        flat = _finite_logprobs(output)
        starts = flat.start_indices[scoring.start :]
        first, offsets = starts[0], [*starts, flat.end_indices[-1]]
        entries = flat.token_ids[first:], flat.logprobs[first:]
        return CompactLogprobs.of(*entries, [each - first for each in offsets], offsets[-1] - offsets[-2] - 1)
    values = output.prompt_token_id_logprobs
    if values is None:
        raise EngineFailed("vLLM returned no logprobs of target tokens: send the request again")
    lengths = [len(row) for row in scoring.target_token_ids]
    asked = np.arange(values.shape[1]) < np.array(lengths)[:, None]
    if not np.isfinite(values[asked]).all():
        raise NonFiniteLogprob("a target token has a logprob that is not finite: the weights are likely broken")
    ids = list(itertools.chain.from_iterable(scoring.target_token_ids))
    return CompactLogprobs.of(ids, values[asked], list(itertools.accumulate(lengths, initial=0)), 0)


def prompt_candidates(output: RequestOutput) -> PromptCandidates:
    """Return None for the first prompt token, and for each other the token itself followed by the top logprobs. Tokens
    without a finite logprob are left out."""
    flat = _finite_logprobs(output)
    logprobs, ranks = np.array(flat.logprobs), np.array([rank or 0 for rank in flat.ranks])
    kept = np.isfinite(logprobs)
    ends = np.concatenate([[0], np.cumsum(kept)])[flat.end_indices]
    return PromptCandidates(ends, np.array(flat.token_ids)[kept], logprobs[kept], ranks[kept])


def _finite_logprobs(output: RequestOutput) -> FlatLogprobs:
    """Return the prompt's logprobs. Raises NonFiniteLogprob if that of a token of the prompt itself is not finite."""
    flat, tokens = output.prompt_logprobs, len(output.prompt_token_ids or ())
    if not isinstance(flat, FlatLogprobs) or len(flat.start_indices) != tokens:
        raise EngineFailed(f"vLLM returned prompt logprobs as {type(flat).__name__}, not one for each token")
    for position, start in enumerate(flat.start_indices[1:], start=1):
        if not math.isfinite(value := flat.logprobs[start]):
            raise NonFiniteLogprob(
                f"token {position} of the prompt has logprob {value}: the weights are likely broken",
                {"position": position},
            )
    return flat
