"""Run the whole service on this machine within a ``with`` block: for scripts, notebooks, demos and tests."""

import logging
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rollout_service.app import build
from rollout_service.compat.ray_internals import serve_controller, shut_down_serve
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import Document, application_args, read_document, start_options
from rollout_service.fleet.serve_status import not_running

logger = logging.getLogger(__name__)

APPLICATION = "rollout"
LOGICAL_CPUS = 64
"""Number of CPUs given to Ray: replicas share the real cores, and a laptop must not run out of slots."""

_PORTS = range(20_000, 32_000)
"""Ports above those of Ray's workers, and below those that Linux uses for outgoing connections by default."""


class ServiceNotStarted(RuntimeError):
    """A deployment could not start; names it, with its error."""


@dataclass(frozen=True)
class LocalService:
    """A running service."""

    url: str
    config: ServiceConfig
    metrics_targets: tuple[str, ...]
    """URLs that Prometheus scrapes: the service's, and that of each node's Ray agent; see docs/metrics.md."""


def load_config(path: Path, overrides: Mapping[str, Mapping[str, object]] | None = None) -> ServiceConfig:
    """Load the ``args`` of a deployment YAML's application, replaced by ``overrides`` (section → field → value).

    Raises ValueError (including pydantic.ValidationError).
    """
    args = application_args(path)
    for section, fields in (overrides or {}).items():
        given = args.get(section, {})
        if isinstance(given, dict):  # the configuration refuses anything else, and says why
            args[section] = {**given, **fields}
    return ServiceConfig.model_validate(args)


@contextmanager
def running_service(
    path: Path,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    *,
    port: int | None = None,
    verbose: bool = False,
) -> Iterator[LocalService]:
    """Start Ray and Serve on loopback, wait until the service answers, and stop both at the end in any case.

    ``port``: HTTP port; None: any free one. ``verbose``: show the replicas' logs in this process's output. Raises
    ServiceNotStarted, with the reason, once Serve has given up.
    """
    config = load_config(path, overrides)
    port = port or free_port()
    with local_ray(verbose=verbose):
        if not verbose:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = start_options(read_document(path))
        http = {**options.get("http_options", {}), "host": "127.0.0.1", "port": port}
        with deploy(config, {**options, "http_options": http}):
            url = f"{'https' if http.get('ssl_certfile') else 'http'}://127.0.0.1:{port}"
            yield LocalService(url=url, config=config.resolved(), metrics_targets=metrics_targets(url))


def start_ray(*address: str, **options: Any) -> Any:
    """Return the context of ``ray.init`` with these arguments. Raises ServiceNotStarted if Ray exceeds its 30 s."""
    try:
        return ray.init(*address, **options)
    except Exception as error:
        if type(error) is not Exception:  # Ray raises this class itself when its time is over
            raise
        raise ServiceNotStarted(f"Ray did not start: {error} Start it again when this machine is less busy") from error


@contextmanager
def local_ray(*, verbose: bool = False) -> Iterator[str]:
    """Run a Ray cluster of only this machine until the block ends; yields its address. ``verbose``: see
    ``running_service``."""
    context = start_ray(
        "local",  # never a cluster that happens to run on this machine
        num_cpus=LOGICAL_CPUS,
        namespace="serve",
        include_dashboard=False,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
    )
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()


@contextmanager
def deploy(
    config: ServiceConfig, options: Document, starting: AbstractContextManager[object] | None = None
) -> Iterator[None]:
    """Run Serve, with the service as its application, in this process's Ray cluster until the block ends.

    ``options``: see ``start_options``. ``starting``: entered for the time of the start alone. The block begins once the
    service answers. Raises ServiceNotStarted, with the reason, once Serve has given up.
    """
    controller = None
    try:
        with starting or nullcontext():
            serve.start(**options)
            controller = serve_controller()
            _run(config, options)
        yield
    finally:
        try:
            if controller is not None:  # also if the application still starts: Serve gives its engine drain_timeout_s
                _delete()
        finally:
            shut_down_serve(controller)


def _run(config: ServiceConfig, options: Document) -> None:
    try:
        logging_config = options.get("logging_config")
        serve.run(build(config), name=APPLICATION, route_prefix="/", logging_config=logging_config)
    except RuntimeError as error:  # names the deployment, but not the reason
        said = "; ".join(f"{name}: {why}" for name, why in sorted(not_running(APPLICATION).items()))
        raise ServiceNotStarted(f"{error} {said}") from error


def _delete() -> None:
    """End the application while Serve's proxies exist, so that open requests are answered.

    ``serve.shutdown`` kills the proxies first, and still waits for open requests (Ray 2.60.0).
    """
    try:
        serve.delete(APPLICATION)
    except (RayError, RayServeException, TimeoutError) as error:  # a cluster that is ending by itself
        logger.warning("the application did not end by itself: %s", error)


def metrics_targets(url: str) -> tuple[str, ...]:
    """Return the URLs that Prometheus scrapes for a service at ``url`` in this process's Ray cluster."""
    agents = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()]
    return (f"{url}/metrics", *agents)


def free_port() -> int:
    """Return a TCP port that was free a moment ago. Raises OSError if none was found.

    Not a port chosen by the system, which may give the same one to Ray before the caller has bound it.
    """
    for port in random.sample(_PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"100 ports from {_PORTS.start} to {_PORTS.stop - 1} are all taken")
