"""The builder that ``serve run deployments/….yaml`` calls: ServiceConfig → Serve application.

Imports neither vLLM nor torch: deployments are named by import paths, which their replicas import.
"""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application, Deployment

from rollout_service.config import ScalingConfig, ServiceConfig
from rollout_service.engine.environment import engine_environment, is_vllm_for_cpu
from rollout_service.fleet.autoscaling import RolloutAutoscaling
from rollout_service.fleet.routing import STATS_PERIOD_S, RolloutRouter
from rollout_service.model.hub import pinned

# Serve's own limit (5) would queue control calls behind paused rollouts; the replica's admission limit decides instead
UNLIMITED = 1_000_000
HEALTH_CHECK_PERIOD_S = 0.5
"""Time in seconds between health checks. Serve replaces a replica with a dead process at the next check, and one that
reports an error at the third."""
HEALTH_CHECK_TIMEOUT_S = 10
"""Timeout in seconds of one check; after three, a replica that does not answer is replaced."""
LOOK_BACK_S = 15
"""Serve makes replicas record their load five times in this time, in seconds. They send it every 10 s, which no public
option changes."""


def build(config: ServiceConfig) -> Application:
    """Build the application: gateway → engines; with the ingest and the monitor.

    First creates the model if ``model.create`` is set. Pins the commit of a model on the Hugging Face hub. Raises
    ModelNotDownloaded, or ValueError for invalid ``engine.extra`` or ``engine.env``.
    """
    if config.engine.extra:
        from rollout_service.engine.extra import check_extra  # imports vLLM, which takes seconds

        check_extra(config)
    config = pinned(config.resolved()).with_gpus(not is_vllm_for_cpu())
    if config.model.create == "tiny-qwen3" and not (here := config.model.here().path).exists():
        from rollout_service.model.tiny import make_tiny_qwen3  # imports transformers

        make_tiny_qwen3(here)
    ingest_resources = {
        "num_cpus": 0,
        "num_gpus": config.weights.ingest_num_gpus,
        "resources": config.weights.ingest_resources,
    }
    monitor = _deployment(config, "monitor.deployment.MonitorReplica", "monitor").bind(config)
    ingest = _deployment(config, "ingest.deployment.IngestReplica", "ingest", ray_actor_options=ingest_resources).bind(
        config
    )
    engine = _engines(config, ingest, monitor, None, scaling_options(config.scaling))
    groups = {
        name: _engines(config, ingest, monitor, name, {"num_replicas": group.replicas})
        for name, group in config.scaling.groups.items()
    }
    several = config.scaling.gateways > 1  # a single one keeps sessions itself
    sessions = _deployment(config, "sessions.deployment.SessionsReplica", "sessions").bind(config) if several else None
    # when another configuration is deployed, the next gateways serve before these are removed; engines and the ingest
    # would wait for GPUs, or for the log, that the old ones hold
    gateway = _deployment(
        config,
        "gateway.deployment.GatewayReplica",
        "gateway",
        num_replicas=config.scaling.gateways,
        max_surge_percent=100,
    )
    return gateway.bind(config, engine, ingest, monitor, sessions, groups)


def _engines(
    config: ServiceConfig,
    ingest: Application,
    monitor: Application,
    group: str | None,
    scaling: dict[str, object],
) -> Application:
    """Return the engine deployment, or that of a group of ``scaling.groups``."""
    router = RequestRouterConfig(
        request_router_class=RolloutRouter,
        request_router_kwargs={
            "limit": config.engine.sequences_per_replica,
            "share": config.sequences_per_gateway,
            "group": group,
        },
        request_routing_stats_period_s=STATS_PERIOD_S,
    )
    deployment = _deployment(
        config,
        "engine.replica.EngineReplica",
        "engine" if group is None else f"engine-{group}",
        ray_actor_options=_resources(config),
        request_router_config=router,
        **scaling,
    )
    return deployment.bind(config, ingest, monitor, group)


def _deployment(config: ServiceConfig, cls: str, name: str, **options: object) -> Deployment:
    """Return a deployment of the class at ``cls``, an import path below this package."""
    options.setdefault("ray_actor_options", {"num_cpus": 0})
    # Ray types the argument as a class, and takes an import path, too: `Deployment.func_or_class` has both
    decorate: Any = serve.deployment(
        name=name,
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.scaling.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        **options,
    )
    deployment: Deployment = decorate(f"rollout_service.{cls}")
    return deployment


def scaling_options(scaling: ScalingConfig) -> dict[str, object]:
    """Return options of the engine deployment: a fixed number of replicas, or our policy within its bounds."""
    if not scaling.autoscaled:
        return {"num_replicas": scaling.min_replicas}
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        # an engine that cannot start should fail the start of the service, not the first request; above zero Serve
        # would fall back to this number at each redeployment
        initial_replicas=1 if scaling.min_replicas == 0 else None,
        max_replicas=scaling.max_replicas,
        look_back_period_s=LOOK_BACK_S,
        # the policy has its own delays, which do not count time in which versions move
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(
            policy_function=RolloutAutoscaling,
            policy_kwargs=scaling.model_dump(
                include={"target_sequences", "target_kv_usage", "upscale_delay_s", "downscale_delay_s"}
            ),
        ),
    )
    return {"autoscaling_config": autoscaling}


def _resources(config: ServiceConfig) -> dict[str, object]:
    return {
        "num_cpus": config.scaling.num_cpus,
        "num_gpus": config.scaling.num_gpus,
        "resources": config.scaling.resources,
        "runtime_env": {"env_vars": engine_environment(config)},
    }
