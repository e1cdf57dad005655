"""verl's RolloutReplica, which stands for the whole service with all its engines, and the actor that verl's clients
call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsInt

import httpx
import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from rollout_service.client.verl.settings import NAME, ServiceSettings, server_name, settings_of
from rollout_service.errors import InvalidRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import RolloutConfig

    from rollout_service.client._client import RolloutClient
    from rollout_service.protocol.rollout import Completion

_STANDALONE_ONLY = (
    f"rollout.name={NAME} is a service on GPUs of its own and does not share the trainer's: use it with a trainer that "
    "has standalone rollouts (separate_async with actor_rollout_ref.hybrid_engine=False, one_step_off_policy or "
    "fully_async)"
)
_TAKEN = {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
"""Parameters that verl may send and our client does not support. These values have no effect."""
_FIXED = {"enable_rollout_routing_replay": False, "full_determinism": False, "logprobs_mode": "processed_logprobs"}
"""Settings of verl's rollout that would change its samples or logprobs. The plugin has these values only."""
_NO_SLEEP = (
    "this plugin is for rollouts on GPUs of their own, which have nothing to free for the trainer: use separate_async, "
    "one_step_off_policy or fully_async, not the hybrid engine"
)


class RolloutServiceReplica(RolloutReplica):
    """Implements ``rollout.name=rollout_service`` of verl 0.9.1, verl/workers/rollout/replica.py.

    It takes no GPU of verl's cluster. It has the server, and one worker without a GPU for verl's checkpoint manager.
    verl creates ``n_gpus_per_node × nnodes / tensor_model_parallel_size`` replicas; that must be one.
    """

    def __init__(
        self, replica_rank: int, config: RolloutConfig, model_config: DictConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise NotImplementedError(f"rollout.name={NAME} serves the policy, not a reward model or a teacher")
        num_replicas = self.config.n_gpus_per_node * self.config.nnodes // self.world_size
        if num_replicas > 1:
            raise ValueError(
                f"verl would make {num_replicas} replicas of rollout.name={NAME}, but one represents the whole "
                "service: set rollout.nnodes=1, rollout.n_gpus_per_node=1 and rollout.tensor_model_parallel_size=1; "
                "scaling.max_replicas of the service sets the number of engines"
            )
        given = {name: getattr(self.config, name) for name in _FIXED}
        if refused := {f"rollout.{name}": value for name, value in given.items() if value != _FIXED[name]}:
            raise NotImplementedError(f"rollout.name={NAME} does not implement {refused}: leave verl's default")
        self._settings = settings_of(self.config.checkpoint_engine.engine_kwargs)

    async def init_hybrid(self, *_: object, **__: object) -> NoReturn:
        """Raise NotImplementedError: the service has its own GPUs."""
        raise NotImplementedError(_STANDALONE_ONLY)

    init_hybrid_colocated = init_colocated = init_hybrid

    async def init_standalone(self) -> None:
        """Start one worker and the server, without a GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool(
            [1], use_gpu=False, max_colocate_count=1, name_prefix=f"{NAME}_{self.replica_rank}"
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"{NAME}_worker_{self.replica_rank}",
            use_gpu=False,
            device_name="cpu",
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the actor that verl's clients call."""
        lengths = (self.config.prompt_length, self.config.response_length, self.config.max_model_len)
        defaults = {name: getattr(self.config, name) for name in ("ignore_eos", "repetition_penalty")}
        server = (
            ray.remote(RolloutServer)
            .options(name=server_name(self.replica_rank), max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(self._settings, *lengths, defaults)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = httpx.URL(self._settings.url).netloc.decode()


class RolloutServer:
    """A Ray actor with the methods of verl 0.9.1's vLLMHttpServer that its clients and checkpoint manager call.

    It forwards each call to our HTTP client.

    verl aborts running requests before it sends weights. ``abort_all_requests`` pauses the service with ``mode=abort``;
    each request returns its tokens so far and ``stop_reason="aborted"``. After ``resume_generation``,
    FullyAsyncLLMServerClient requests the rest, which the new version samples. Each segment therefore has one version.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        prompt_length: int,
        response_length: int,
        max_model_len: int | None,
        defaults: Mapping[str, object],
    ) -> None:
        """Store the arguments. ``defaults``: verl's parameters for requests that leave them out."""
        self._settings, self._defaults = settings, defaults
        self._prompt_length, self._response_length = prompt_length, response_length
        self._max_model_len = max_model_len
        self._client: RolloutClient | None = None
        self._steps: dict[int, int | None] = {}
        self._rejecting = False

    async def generate(
        self,
        prompt_ids: Iterable[SupportsInt],
        sampling_params: Mapping[str, object],
        request_id: str,
        image_data: object = None,
        video_data: object = None,
        audio_data: object = None,
        mm_processor_kwargs: object = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Return one completion. ``extra_fields`` has ``global_steps`` of its last token, and the minimum and maximum
        of all tokens.

        Raises InvalidRequest for unsupported parameters, and the errors of ``RolloutClient.generate``.
        """
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        if given := [name for name, value in media.items() if value is not None]:
            raise InvalidRequest(f"{', '.join(given)}: the rollout service takes text only")
        if self._rejecting:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._newest_steps()})
        tokens = [int(token) for token in prompt_ids]
        parameters = {**self._defaults, **sampling_params}
        wants_logprobs = bool(parameters.pop("logprobs", False))
        rollout = await self._open_client().generate(
            tokens,
            max_tokens=self._max_tokens(parameters, len(tokens)),
            request_id=request_id,
            priority=priority,
            on_abort="return",
            **generate_arguments(parameters),
        )
        (completion,) = rollout.completions
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.logprobs) if wants_logprobs else None,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            extra_fields={**self._labels(completion), "num_cached_tokens": rollout.cached_tokens},
        )

    async def set_global_steps(self, global_steps: int | None, version: int) -> None:
        """Record verl's ``global_steps`` of the service's ``version``."""
        self._steps[version] = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End running requests with their tokens so far. Hold new requests, or with ``reject_request`` refuse them."""
        self._rejecting = reject_request
        await self._open_client().pause("abort")

    async def resume_generation(self) -> None:
        """Resume the service, and accept requests again."""
        await self._open_client().resume()
        self._rejecting = False

    async def clear_kv_cache(self) -> None:
        """Do nothing: a version drops or keeps the KV cache, by ``weights.kv_cache_on_update``."""

    async def release_kv_cache(self) -> None:
        """Do nothing: the engines do not share verl's GPUs."""

    async def resume_kv_cache(self) -> None:
        """Do nothing: the KV cache was not released."""

    async def sleep(self) -> NoReturn:
        """Raise NotImplementedError: the engines do not share verl's GPUs."""
        raise NotImplementedError(f"sleep: {_NO_SLEEP}")

    async def wake_up(self, tags: list[str] | None = None) -> NoReturn:
        """Raise NotImplementedError: the engines do not share verl's GPUs."""
        raise NotImplementedError(f"wake_up: {_NO_SLEEP}")

    async def start_profile(self, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError: verl cannot profile the engines."""
        raise NotImplementedError("start_profile: the engines of the rollout service are not profiled from verl")

    async def stop_profile(self) -> NoReturn:
        """Raise NotImplementedError: verl cannot profile the engines."""
        raise NotImplementedError("stop_profile: the engines of the rollout service are not profiled from verl")

    def _max_tokens(self, parameters: dict[str, Any], prompt_tokens: int) -> int:
        """Return the token limit as verl's vLLM server computes it: the request's, else the configured lengths, within
        the context."""
        named = [parameters.pop(name) for name in ("max_tokens", "max_new_tokens") if name in parameters]
        left = min(self._response_length, self._prompt_length + self._response_length - prompt_tokens)
        wanted = named[0] if named else left
        if self._max_model_len is not None:
            wanted = min(wanted, self._max_model_len - prompt_tokens)
        return max(1, wanted)

    def _labels(self, completion: Completion) -> dict[str, object]:
        steps = [self._steps.get(version) for version in completion.versions]
        known = [step for step in steps if step is not None]
        return {
            "global_steps": steps[-1] if steps else self._newest_steps(),
            "min_global_steps": min(known, default=None),
            "max_global_steps": max(known, default=None),
            "weight_versions": list(completion.versions),
        }

    def _newest_steps(self) -> int | None:
        return self._steps[max(self._steps)] if self._steps else None

    def _open_client(self) -> RolloutClient:
        if self._client is None:
            self._client = self._settings.client()
        return self._client


def generate_arguments(parameters: Mapping[str, object]) -> dict[str, Any]:
    """Return verl's sampling parameters as arguments of ``RolloutClient.generate``. Raises InvalidRequest for
    others."""
    refused = {
        name: value
        for name, value in parameters.items()
        if value is not None and name not in _TAKEN and value != _NEUTRAL.get(name)
    }
    if refused:
        raise InvalidRequest(f"sampling parameters that the rollout service does not take from verl: {refused}")
    return {name: value for name, value in parameters.items() if name in _TAKEN and value is not None}
