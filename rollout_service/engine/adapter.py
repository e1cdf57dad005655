"""The narrow seam to vLLM: start, generate, pause, load a version, say if alive.

A version that fails between ``start`` and ``finish`` leaves parameters half loaded, and vLLM cannot heal that by
trying again (a later update may be written unquantized into the kernels' tensors). The engine is then ``broken``:
it answers nothing any more, its health check fails, and the replica is replaced.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rollout_service.compat.vllm_internals import environment_as_it_is, made_since, pause_scheduler
from rollout_service.engine.load_statistics import RayStats, SchedulerLog
from rollout_service.engine.loading.staging_calls import StageCall, staged_by
from rollout_service.engine.partial_penalties import with_partial_penalties
from rollout_service.errors import EngineFailed, InvalidRequest, LogCorrupt, MemoryTaken, NonFiniteLogprob
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.fleet import PauseMode, Staging
from rollout_service.protocol.kv_scales import KVMeasurement
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import Reasoning, Sampling
from rollout_service.protocol.sampling_mask import pack

logger = logging.getLogger(__name__)


class EngineAdapter:
    """One vLLM engine. Construct it inside the event loop that will use it; construction takes tens of seconds."""

    def __init__(self, args: AsyncEngineArgs, *, load_limit_s: float = math.inf, exports: bool = True) -> None:
        """``load_limit_s``: the health check fails while a version loads for longer.

        ``exports``: vLLM's metrics; those of an engine that serves nobody would count among the fleet's.
        """
        self.scheduler = SchedulerLog()
        """What the engine was doing at its last step."""
        loggers = [lambda _config, _index: self.scheduler, *([RayStats] if exports else [])]
        with environment_as_it_is():
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        self.staging: Staging | None = None
        """Where its workers stage versions; None before ``connect``."""
        self.attention_backends: tuple[str, ...] = ()
        """See ``AttentionStatus``; empty before ``connect``."""
        self._staging_addresses: tuple[str, ...] = ()
        self._half_loaded: str | None = None
        self._has_loaded = False
        self._load_limit_s, self._loading_since = load_limit_s, math.inf
        self._generating: set[asyncio.Task[RequestOutput]] = set()

    @property
    def broken(self) -> str | None:
        """Why the engine must be replaced; None while it is sound."""
        return "the engine's process is dead" if self._llm.errored else self._half_loaded

    @property
    def kv_cache_tokens(self) -> int:
        """What the KV cache holds."""
        cache = self._llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size

    @property
    def _least_top_k(self) -> int:
        """The first that vLLM takes: an engine that returns sampling masks refuses 0, the whole vocabulary."""
        return int(self._llm.vllm_config.model_config.return_sampling_mask)

    async def ask_workers(self, method: str, *args: object) -> list[Any]:
        """The answer of each worker, by rank, to a method of ``engine/worker.py``. Raises what they raise."""
        answers: list[Any] = await self._llm.collective_rpc(method, args=args)
        return answers

    async def kv_reads(self) -> tuple[int, int]:
        """Tokens of KV that decode has attended to in batches that were grouped, and those of them that it did not read
        since another sequence's reading served; of one layer, up to when this was asked before."""
        (attended, spared), *_ = await self.ask_workers("kv_reads")  # each rank groups the same batches
        return attended, spared

    async def label(self, version: int) -> None:
        """Call the weights that are loaded a version: dummies, say, which have no number."""
        await self._llm.update_weight_version(str(version))

    async def connect(self) -> None:
        """Prepare the weight-transfer engine in the workers, and run two steps on the dummy weights."""
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        (self.staging, why), *_ = await self.ask_workers("staging_kind")
        self._staging_addresses = tuple(await self.ask_workers("staging_address"))
        self.attention_backends = tuple((await self.ask_workers("attention_backends"))[0])
        if why is not None:
            logger.log(logging.WARNING if self.staging == "none" else logging.INFO, "%s", why)
        # the first forward passes compile and allocate for seconds; no rollout should wait for that
        warm_up = Sampling(max_tokens=2, ignore_eos=True, top_k=self._least_top_k)
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
    ) -> tuple[Completion, ...]:
        """The ``n`` completions of one prompt. Cancelling the call aborts them in the engine.

        ``partial_tokens``: see ``GenerateCall``.
        Raises EngineFailed when the engine is dead or broken, InvalidRequest for what vLLM refuses, NonFiniteLogprob.
        """
        if sampling.routed_experts_prompt_start is not None and not self._llm.vllm_config.aux_output_config.enabled:
            raise InvalidRequest("routed experts are asked for, and engine.return_routed_experts is not set")
        parameters = vllm_sampling(sampling, len(prompt), partial_tokens)
        stream = self._stream(request_id, prompt, parameters, priority, cache_salt, reasoning)
        return completions(await self._output(request_id, stream), sampling)

    def made_since(self, request_id: str, since: Sequence[int], candidates: int = 0) -> list[Completion]:
        """What ``generate`` has made meanwhile of each completion that has more than its first ``since[index]`` tokens.

        Each with these tokens alone, whose spans count from the first of them. ``finish_reason`` is "abort" for one
        that goes on, and its own for one that has ended while others of the call go on: those come every time.
        ``candidates``: the call's ``sampling.logprobs``. Nothing is said of what ``generate`` will raise for, nor of a
        call that is over.
        """
        made = []
        for output in made_since(self._llm, request_id, since):
            goes_on = output.finish_reason is None
            try:
                made.append(completion(replace(output, finish_reason="abort") if goes_on else output, candidates))
            except (EngineFailed, NonFiniteLogprob):
                continue
        return made

    async def score(self, request_id: str, token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], int]:
        """Natural-log probability of each token but the first, given those before it, [tokens - 1], and the version.

        They are the model's own: at temperature 1, nothing cut off. The version is the one that the engine had at the
        end. Raises what ``generate`` raises.
        """
        # vLLM tells the logprobs of a prompt with its first token
        sampled_token = Sampling(max_tokens=1, ignore_eos=True, top_k=self._least_top_k, prompt_logprobs=0)
        parameters = vllm_sampling(sampled_token, len(token_ids))
        output = await self._output(request_id, self._stream(request_id, token_ids, parameters))
        [sampled] = output.outputs
        return prompt_logprobs(output), completion(sampled).spans[0].version

    async def _output(self, request_id: str, stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
        """The last output of a stream, which vLLM's engine hears of when it is first awaited."""
        self._require_sound()
        task = asyncio.create_task(self._collect(request_id, stream), name=request_id)
        self._generating.add(task)
        task.add_done_callback(self._generating.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._half_loaded is None or _cancelled_by_caller():
                raise
        raise EngineFailed(f"{request_id} was under way when {self._half_loaded}")

    @staticmethod
    async def _collect(request_id: str, stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
        final: RequestOutput | None = None
        try:
            async for output in stream:
                final = output  # the only one, with FINAL_ONLY
        except EngineDeadError as error:
            raise EngineFailed(f"the engine died while it generated {request_id}: retry") from error
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequest(str(error)) from error
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            raise InvalidRequest(str(error.__cause__)) from error  # some of vLLM's refusals are plain ValueErrors
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
    ) -> AsyncGenerator[RequestOutput]:
        tokens = tokens_input(list(prompt), cache_salt=cache_salt)
        if reasoning is None:
            return self._llm.generate(tokens, sampling, request_id, priority=priority)
        return self._llm.generate(
            tokens,
            sampling,
            request_id,
            priority=priority,
            reasoning_ended=reasoning.ended,
            reasoning_parser_kwargs=reasoning.parser_kwargs or None,
        )

    async def abort(self) -> None:
        """End every completion with the tokens that it has, whatever the engine does meanwhile: they end "abort"."""
        if self.broken is None:
            await self._llm.abort([task.get_name() for task in self._generating])

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling. The KV cache is dropped, so nothing computed before is read after: see ``PauseMode``.

        ``wait`` returns when the last running request has finished, or when another pause has taken over. Cancelled, it
        leaves the engine closed to new requests until ``resume`` or another pause.
        """
        await pause_scheduler(self._llm, mode)

    async def resume(self) -> None:
        """Schedule again. Raises EngineFailed if broken: half a version is never served."""
        self._require_sound()
        await self._llm.resume_generation()

    async def stage(self, folder: Path, digest: str | None = None) -> None:
        """Have the workers read and check a committed version while the engine serves, into their staging areas.

        ``digest``: of the manifest that is meant. When this returns, every byte of the version was checked. What cannot
        lie in an area is loaded from its files, with a warning. Raises LogCorrupt naming tensor, chunk and file, or
        EngineFailed when the engine is dead, or a worker failed otherwise.
        """
        self._require_sound()
        try:
            call = StageCall(folder=str(folder), digest=digest)
            answers = await asyncio.gather(*(staged_by(address, call) for address in self._staging_addresses))
        except (OSError, ValidationError) as error:
            raise EngineFailed(f"{folder} could not be staged: {error}") from error
        for rank, answer in enumerate(answers):
            if answer.failed is not None:
                raise EngineFailed(f"rank {rank} could not stage {folder}: {answer.failed}")
            if answer.corrupt is not None:
                raise LogCorrupt(*answer.corrupt)
            if answer.refused is not None:
                # the first one of a tensor-parallel engine is always too large: it teaches what each rank needs
                level = logging.WARNING if self._has_loaded else logging.INFO
                logger.log(level, "rank %d loads %s layer by layer from its files: %s", rank, folder, answer.refused)

    async def load(self, folder: Path, version: int, kv_scales: dict[str, float] | None = None) -> float:
        """Load a committed version while paused; returns seconds. Any failure leaves the engine broken.

        Until then it is sound: requests wait in it, as over any pause.
        ``kv_scales``: of the FP8 cache; None: those in the manifest.
        """
        self._require_sound()
        self._loading_since = started = time.perf_counter()
        info = {"folder": str(folder), "kv_scales": kv_scales}
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
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

    async def measure_kv(
        self, sequences: list[list[int]], scales: dict[str, float] | None = None
    ) -> tuple[KVMeasurement, ...]:
        """What each rank sees of q, k and v in a forward pass beside all requests; call it while paused.

        ``scales``: as in ``kv_scales/worker.py``. Raises EngineFailed, with the reason.
        """
        self._require_sound()
        try:
            ranks = await self.ask_workers("measure_kv", sequences, scales)
        except Exception as error:
            raise EngineFailed(f"keys and values could not be measured: {error}") from error
        return tuple(KVMeasurement.model_validate(rank) for rank in ranks)

    async def set_kv_scales(self, scales: dict[str, float] | None) -> None:
        """Other scales for the loaded weights, while paused and with nothing cached. A failure leaves it broken."""
        self._require_sound()
        try:
            await self.ask_workers("set_kv_scales", scales)
        except Exception as error:
            raise self._is_lost("loading KV scales failed", error) from error

    async def sleep(self) -> tuple[int, ...]:
        """Give back the memory of weights, staging area and KV cache, while paused with nothing under way.

        Requests wait in the engine, as over any pause. Returns how many bytes each rank gave back. A failure leaves the
        engine broken: raises EngineFailed.
        """
        self._require_sound()
        started = time.perf_counter()
        try:
            dropped = tuple(await self.ask_workers("drop_memory"))
        except Exception as error:
            raise self._is_lost("giving memory back failed", error) from error
        gib = ", ".join(f"{nbytes / 2**30:.1f}" for nbytes in dropped)
        logger.info("asleep in %.2f s: %s GiB given back, by rank", time.perf_counter() - started, gib)
        return dropped

    async def wake_up(self) -> None:
        """Take the memory again, which holds no weights then: ``stage`` and ``load`` are next.

        Raises MemoryTaken, and sleeps on, if another process has it. Any other failure leaves the engine broken: raises
        EngineFailed.
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
        except MemoryTaken:
            raise
        except Exception as error:
            raise self._is_lost("taking memory failed", error) from error
        logger.info("awake in %.2f s, without weights yet", time.perf_counter() - started)

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine is dead or broken, or has been loading a version for too long."""
        self._require_sound()
        loading_s = time.perf_counter() - self._loading_since
        if loading_s > self._load_limit_s:
            raise EngineFailed(
                f"a version has been loading for {loading_s:.0f} s: this replica is given up; if it was only slow, set "
                f"engine.load_limit_s above {self._load_limit_s:g}"
            )
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineFailed("the engine's process is dead") from error

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._llm.shutdown()

    def _is_lost(self, what: str, error: BaseException) -> EngineFailed:
        """The engine is broken from now on, and rollouts that it kept for later will have no answer from it."""
        self._half_loaded = f"{what}: {str(error) or type(error).__name__}"
        for task in self._generating:
            task.cancel()
        return EngineFailed(self._half_loaded)

    def _require_sound(self) -> None:
        if self.broken is not None:
            raise EngineFailed(f"this replica is being replaced: {self.broken}")


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_NOT_VLLMS = {"stop", "stop_token_ids", "logprobs", "structured_outputs", "routed_experts_prompt_start"}
"""Of the sampling parameters: those that vLLM gets in another form, or not at all."""


def vllm_sampling(sampling: Sampling, prompt_tokens: int = 0, partial_tokens: int = 0) -> SamplingParams:
    """vLLM's parameters, for one message when all completions are done. Raises InvalidRequest for what vLLM refuses.

    An engine that notes routed experts tells them with every completion: those of the prompt's ``prompt_tokens`` are
    left out of one that nobody asked for. ``partial_tokens``: see ``GenerateCall``.
    """
    experts_from = sampling.routed_experts_prompt_start
    parameters = sampling.model_dump(exclude=_NOT_VLLMS | {"detokenize", "output_kind", "extra_args"})
    parameters |= with_partial_penalties(sampling, partial_tokens)
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


def _structured_outputs(sampling: Sampling) -> StructuredOutputsParams | None:
    wanted = sampling.structured_outputs
    if wanted is None:
        return None
    fields = wanted.model_dump(by_alias=True, exclude_none=True)
    return StructuredOutputsParams(**{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()})


_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def completions(output: RequestOutput, sampling: Sampling) -> tuple[Completion, ...]:
    """Our form of vLLM's final output.

    Raises InvalidRequest where vLLM could not make the structure that was asked for (it then ends a completion with the
    finish reason "error"), and what ``completion`` raises.
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
    if sampling.prompt_logprobs is None:
        return made
    of_the_prompt = prompt_candidates(output)
    return tuple(each.model_copy(update={"prompt_logprobs": of_the_prompt}) for each in made)


def completion(output: CompletionOutput, candidates: int = 0) -> Completion:
    """Our form of vLLM's final output; ``candidates``: how many of the likeliest tokens were asked for.

    Raises NonFiniteLogprob, or EngineFailed for a finish reason we do not know.
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
    """The sampling mask in one chunk; None if the engine returns none. Raises EngineFailed if tokens lack theirs."""
    mask = output.sampling_mask
    if mask is None:
        return None
    if len(mask.token_ids) != len(output.token_ids):
        raise EngineFailed(
            f"vLLM returned sampling masks of {len(mask.token_ids)} tokens for a completion of {len(output.token_ids)}"
        )
    return (pack(mask.token_ids),)


def routed_experts(output: CompletionOutput, start: int, prompt_tokens: int) -> RoutedExperts | None:
    """The experts of tokens from ``start`` on, counted from the prompt's first; None of a completion without tokens.

    Raises EngineFailed if vLLM tells none, or of more tokens than there are. InvalidRequest if it tells nothing but
    zeros: a router never chooses an expert twice for a token, so zeros come from a kernel that does not tell what it
    chose, and another replica's would not either.
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
    """Natural-log probability of each sampled token: entry 0 of its position."""
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
    """The likeliest tokens of each position. vLLM puts the sampled one before them; what could not be drawn has no
    finite logprob."""
    return tuple(each[1:] for each in _candidates(output.logprobs))


def prompt_candidates(output: RequestOutput) -> tuple[tuple[Candidate, ...] | None, ...]:
    """Each token of the prompt but the first, for which there is None, and then the likeliest ones in its place."""
    prompt_logprobs(output)  # raises for what is not finite
    return (None, *_candidates(output.prompt_logprobs)[1:])


def _candidates(flat: object) -> list[tuple[Candidate, ...]]:
    if not isinstance(flat, FlatLogprobs):
        raise EngineFailed(f"vLLM returned logprobs as {type(flat).__name__}, not FlatLogprobs")
    every = [
        Candidate(token, logprob, rank or 0)
        for token, logprob, rank in zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True)
    ]
    positions = zip(flat.start_indices, flat.end_indices, strict=True)
    return [tuple(each for each in every[start:end] if math.isfinite(each.logprob)) for start, end in positions]


def prompt_logprobs(output: RequestOutput) -> tuple[float, ...]:
    """Natural-log probability of each token of a prompt but the first, [tokens - 1]. Raises NonFiniteLogprob."""
    flat, tokens = output.prompt_logprobs, len(output.prompt_token_ids or ())
    if not isinstance(flat, FlatLogprobs) or len(flat.start_indices) != tokens:
        raise EngineFailed(f"vLLM returned prompt logprobs as {type(flat).__name__}, not one for each token")
    values = tuple(flat.logprobs[start] for start in flat.start_indices[1:])
    for position, value in enumerate(values, start=1):
        if not math.isfinite(value):
            raise NonFiniteLogprob(
                f"token {position} of the prompt has logprob {value}: the weights are likely broken",
                {"position": position},
            )
    return values
