"""Environment variables of an engine's processes: those that the service sets, and ``engine.env``.

Imports neither vLLM nor torch, because the process that builds the application reads it.
"""

import re
from contextlib import suppress
from importlib import metadata

from rollout_service.config import ServiceConfig
from rollout_service.runtime.logs import TELL_VLLM

_RAYS_OWN = re.compile("(CUDA|HIP|ROCR)_VISIBLE_DEVICES|RAY_.*")
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def is_vllm_for_cpu() -> bool:
    """Return True if the installed vLLM is a build for the CPU."""
    for distribution in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            return distribution == "vllm-cpu" or "cpu" in version
    return False


def engine_environment(config: ServiceConfig) -> dict[str, str]:
    """Return the environment variables of the replica's processes. Raises ValueError if ``engine.env`` sets one of
    ours."""
    owned = TELL_VLLM | {
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer is not installed: it compiles for minutes on first use
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_BATCH_INVARIANT": str(int(config.engine.deterministic)),
        # on Hopper, power-of-two scales would requantize our weights in place
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        # tensors do not pass through our RPCs, so pickle is not needed
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    for name in config.engine.env:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"engine.env.{name}: no name of an environment variable")
        if name == "VLLM_BATCH_INVARIANT":
            raise ValueError(f"engine.env.{name} is not taken: set engine.deterministic")
        if name in owned:
            raise ValueError(f"engine.env.{name} is not taken: the service sets it to {owned[name]!r}")
        if _RAYS_OWN.fullmatch(name):
            raise ValueError(f"engine.env.{name} is not taken: Ray sets it, see scaling.num_gpus and scaling.resources")
    return _cpu_processes(config) | config.engine.env | owned


def _cpu_processes(config: ServiceConfig) -> dict[str, str]:
    """Return how a CPU engine that shares its machine runs: unbound, with as many threads as Ray reserves CPUs, and
    with its one worker in the engine core's process, as on a GPU.

    vLLM 0.32 binds each engine of a machine to the same cores. Ray sets ``OMP_NUM_THREADS``. A process of its own for
    the worker, which binding needs, imports vLLM once more: 10 s of each start on two cores.
    """
    alone = config.scaling.max_replicas + config.scaling.pinned_replicas == 1
    # on a GPU the variables would only change the key of torch.compile's cache, so that another fleet size would
    # recompile
    if alone or not is_vllm_for_cpu() or _BINDING in config.engine.env:
        return {}
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if config.engine.tensor_parallel_size == 1 else {}
    return {_BINDING: "nobind"} | one_process
