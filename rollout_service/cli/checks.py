"""Find what would keep a deployment from starting on this machine, before anything is started."""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rollout_service.cli import machine
from rollout_service.cli.machine import TorchCuda
from rollout_service.config import EngineConfig, ServiceConfig
from rollout_service.config.deployment_file import Document, args_of
from rollout_service.config.service import AUTO
from rollout_service.engine.attention.choice import attention_settings
from rollout_service.engine.hardware import has_nvcc, why_unfit
from rollout_service.errors import InvalidManifest, NotFound, RolloutServiceError
from rollout_service.gpu import nvidia_smi
from rollout_service.gpu.nvidia_smi import Gpu
from rollout_service.runtime.memory import Memory
from rollout_service.runtime.memory import memory as memory_here
from rollout_service.runtime.tls import require_certificate

_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


class Problem(NamedTuple):
    """A reason why the service could not start here."""

    check: str
    """The setting, or the part of the machine, that was checked."""
    found: str
    advice: str = ""
    """Settings or actions that help; empty if ``found`` names them."""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + (f" → {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Plan:
    """The deployment to be checked."""

    config: ServiceConfig
    host: str
    port: int
    version_bytes: int = 0
    """Size of a weight version in bytes; 0: unknown, since the model is not here."""
    certificate: tuple[Path, Path] | None = None
    """Files of Serve's certificate and of its key; None: plain HTTP."""

    @classmethod
    def of(cls, document: Document, version_bytes: int = 0) -> "Plan":
        """Create the plan of a Serve config. Raises pydantic.ValidationError."""
        config = ServiceConfig.model_validate(args_of(document)).resolved()
        config = config.with_gpus(config.scaling.num_gpus is None and machine.engines_on_gpus())
        options = document.get("http_options") or {}
        certificate = None
        if options.get("ssl_certfile") is not None:
            certificate = Path(options["ssl_certfile"]), Path(options["ssl_keyfile"])
        host, port = str(options.get("host", "0.0.0.0")), int(options.get("port", 8000))
        return cls(config, host, port, version_bytes, certificate)

    @property
    def url(self) -> str:
        """Return the address of the service for programs on this machine."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{self.port}"

    @property
    def on_gpus(self) -> bool:
        """Return True if engines request GPUs from Ray."""
        return self.config.scaling.on_gpus

    @property
    def engine_gpus(self) -> int:
        """Return the number of GPUs of the first replicas."""
        return self.config.engine.tensor_parallel_size * self.replicas_at_start

    @property
    def replicas_at_start(self) -> int:
        """Return the number of the first replicas."""
        return max(1, self.config.scaling.min_replicas) + self.config.scaling.pinned_replicas

    @property
    def gpus_at_start(self) -> int:
        """Return that number plus the GPUs of the ingest, unless it uses a share that replicas leave free."""
        config = self.config
        wanted = config.weights.ingest_num_gpus or 0
        left = 1 - (config.scaling.num_gpus or 0) if config.engine.tensor_parallel_size == 1 else 0
        return self.engine_gpus + (0 if wanted <= left + 1e-6 else math.ceil(wanted))

    def most_replicas(self, gpus: int) -> int:
        """Return the number of replicas that fit on that many GPUs, beside pinned replicas, and processes that need a
        GPU of their own."""
        wanted, left = self.config.scaling.num_gpus or 0, gpus - (self.gpus_at_start - self.engine_gpus)
        if not wanted:
            return self.config.scaling.max_replicas
        fit = max(0, left) * int(1 / wanted + 1e-6) if wanted <= 1 else max(0, left) // math.ceil(wanted)
        return max(0, fit - self.config.scaling.pinned_replicas)


def with_model(plan: Plan) -> tuple[Plan, list[Problem]]:
    """Add the size of a version to the plan, if the model is in a folder of this machine."""
    try:
        model = plan.config.model.here()
        if model.repo_id is not None or (model.create is not None and not model.path.exists()):
            return plan, []  # it is downloaded or made at the start
        from rollout_service.cli.inspect_model import inspect_model  # seconds, for torch and transformers

        engine = plan.config.engine
        report = inspect_model(model, plan.config.quant, engine.tensor_parallel_size, engine.expert_parallel)
        if model.revision is None:  # else the files that the hub's cache lacks are downloaded at the start
            _require_weights(plan.config.model_copy(update={"model": model}))
        found = list(_context(plan.config.engine, model.path))
    except (OSError, ValueError, RolloutServiceError) as error:
        return plan, [Problem("model", str(error))]
    return replace(plan, version_bytes=report.stored_bytes), found


def _context(engine: EngineConfig, model: Path) -> Iterator[Problem]:
    """Yield a problem if vLLM would refuse the context. Scaled rotary embeddings are left to vLLM."""
    overrides = engine.extra.get("hf_overrides")
    settings: dict[str, object] = {**attention_settings(model), **(overrides if isinstance(overrides, dict) else {})}
    rope = json.dumps(settings.get("rope_parameters") or settings.get("rope_scaling"))
    is_scaled = '"factor"' in rope and '"llama3"' not in rope  # Llama's maximum is that after scaling
    names = ("max_position_embeddings", "model_max_length")
    maximum = max((length for name in names if isinstance(length := settings.get(name), int)), default=0)
    if is_scaled or _ALLOW_LONG in engine.env or not 0 < maximum < engine.max_model_len:
        return
    found = f"{engine.max_model_len}, and config.json of {model} has max_position_embeddings={maximum}"
    yield Problem(
        "engine.max_model_len",
        found,
        f"engine.max_model_len: {maximum} at most, or YaRN by engine.extra.hf_overrides (docs/vllm_settings.md)",
    )


def _require_weights(config: ServiceConfig) -> None:
    """Raise NotFound or InvalidManifest if the log has no version, and the model's folder no weights for version 0."""
    from rollout_service.ingest.sources.folder import safetensors_files
    from rollout_service.store.log_place import log_place

    try:
        safetensors_files(config.model.path, None)
    except (NotFound, InvalidManifest):
        if not (log_place(config).root / "LATEST").is_file():
            raise


def unknown_settings(document: Document) -> Iterator[Problem]:
    """Yield the keys that Serve does not know, and ignores: a misspelled certificate would mean plain HTTP."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    applications = [given for given in document["applications"] if isinstance(given, dict)]
    for where, given, schema in (
        ("", document, ServeDeploySchema),
        ("http_options.", document.get("http_options") or {}, HTTPOptionsSchema),
        *(("applications.", application, ServeApplicationSchema) for application in applications),
    ):
        for name in given.keys() - schema.model_fields.keys():
            yield Problem(
                f"{where}{name}", "no setting of Ray Serve, which ignores it", "another name, or leave it out"
            )


def problems(plan: Plan) -> Iterator[Problem]:
    """Yield what would keep the service from starting."""
    if plan.on_gpus:
        yield from gpus(plan)
        yield from nvcc_problems(plan)
    try:
        memory = memory_here()
    except ValueError as error:
        yield Problem("memory", str(error))
    else:
        yield from memory_problems(memory, plan)
    yield from _weights(plan)
    yield from _ports(plan)
    yield from _certificates(plan)


def gpus(plan: Plan) -> Iterator[Problem]:
    """Yield the problems of the GPUs of this machine."""
    try:
        listed = nvidia_smi.visible_gpus()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield Problem("gpu", str(error), "repair or reload the driver, or restart the machine")
        return
    yield from gpu_problems(listed, machine.torch_cuda() if listed else TorchCuda(built_for=None, devices=0), plan)


def gpu_problems(listed: Sequence[Gpu], torch: TorchCuda, plan: Plan) -> Iterator[Problem]:
    """Yield the problems of the GPUs and their driver. ``listed``: those that CUDA_VISIBLE_DEVICES leaves."""
    if not listed:
        advice = "serve run deployments/cpu_rollout.yaml; or install the driver, and look at CUDA_VISIBLE_DEVICES"
        yield Problem("gpu", "nvidia-smi lists none that may be used", advice)
        return
    unfit = [(gpu, why) for gpu in listed if (why := _unfit(gpu, plan)) is not None]
    usable = len(listed) - len(unfit)
    if usable < plan.gpus_at_start:
        for gpu, (found, advice) in unfit:
            capability = ".".join(map(str, gpu.compute_capability))
            what = f"{gpu.name}, {_gb(gpu.memory_bytes)}, compute capability {capability}"
            yield Problem(f"gpu {gpu.index}", f"{what}: {found}", advice)
        yield _too_few(usable, plan)
    if torch.built_for is None:
        advice = "STACK=gpu make setup, or pip install 'rollout-service[gpu]'"
        yield Problem("cuda", "the installed torch is built for the CPU", advice)
    elif torch.devices < plan.gpus_at_start:
        sees = torch.error or f"torch sees {torch.devices} GPUs of the {plan.gpus_at_start} that are needed"
        found = f"driver {listed[0].driver}, torch for CUDA {torch.built_for}: {sees}"
        yield Problem("cuda", found, "a driver for that CUDA, and CUDA_VISIBLE_DEVICES")


def _unfit(gpu: Gpu, plan: Plan) -> tuple[str, str] | None:
    """Return the reason why no engine could start on it, and what to set."""
    engine = plan.config.engine
    if (unfit := why_unfit(plan.config, gpu.compute_capability)) is not None:
        return unfit
    if (taken := gpu.why_taken(engine.gpu_memory_utilization)) is not None:
        return taken, "end what uses it, or lower that"
    asked = int(engine.gpu_memory_utilization * gpu.memory_bytes)
    held = 2 if engine.staging == "device" else 1
    needed = held * plan.version_bytes // engine.tensor_parallel_size
    if needed > asked:
        twice = ", twice with the staging area" if held == 2 else ""
        advice = "engine.tensor_parallel_size: more GPUs a replica" + ("; or engine.staging: auto" if held == 2 else "")
        return f"the weights alone{twice} take {_gb(needed)} of the {_gb(asked)} that an engine may use", advice
    return None


def _too_few(usable: int, plan: Plan) -> Problem:
    tp, replicas = plan.config.engine.tensor_parallel_size, plan.replicas_at_start
    found = f"{usable} can be used, and {replicas} replicas of {tp} GPUs each need {tp * replicas}"
    advice = "engine.tensor_parallel_size and scaling.num_gpus, or scaling.min_replicas"
    if more := plan.gpus_at_start - plan.engine_gpus:
        found += f"; what the ingest asks for needs {more} more"
        advice = f"weights.ingest_num_gpus: 0; or {advice}"
    return Problem("gpus", found, advice)


def nvcc_problems(plan: Plan) -> Iterator[Problem]:
    """Yield a problem if DeepGEMM is asked for, and CUDA's compiler is not here."""
    asked = plan.config.quant.weights == "fp8_block" and plan.config.engine.linear_backend == "deep_gemm"
    if asked and not has_nvcc():
        found = "none from 12.9 on; engine.linear_backend: deep_gemm compiles its kernels with it"
        yield Problem("nvcc", found, "engine.linear_backend: auto")


def memory_problems(has: Memory, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if Ray would kill workers: it does above a share of used memory, whichever process uses it."""
    engines = 0 if plan.on_gpus else plan.replicas_at_start * plan.version_bytes
    if has.used_bytes + engines >= has.kill_at * has.total_bytes:
        found = (
            f"{_gb(has.used_bytes)} of {_gb(has.total_bytes)} are in use, engines on the CPU take {_gb(engines)}, and "
            f"Ray kills workers from {has.kill_at:.0%} on"
        )
        yield Problem("memory", found, "end what uses it, or take a smaller model or a larger machine")


def _weights(plan: Plan) -> Iterator[Problem]:
    """Yield the problems of the log's disk. The ingest chooses the place itself if it is ``auto``."""
    if plan.config.weights.root == AUTO:
        return
    try:
        root = plan.config.weights.root_here()
        there = next(folder for folder in (root, *root.parents) if folder.exists())
        free, has_versions = shutil.disk_usage(there).free, (root / "LATEST").is_file()
    except (OSError, ValueError) as error:  # OSError: a folder that may not be entered, or a name that is too long
        yield Problem("weights.root", str(error))
        return
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Problem("weights.root", f"{there} is no folder that may be written", "another weights.root")
    elif plan.version_bytes > free and not has_versions:
        found = f"{root}: {_gb(free)} free; a version takes {_gb(plan.version_bytes)}"
        yield Problem("weights.root", found, "weights.root on a larger disk")


def _ports(plan: Plan) -> Iterator[Problem]:
    """Yield the taken ones of the ports of HTTP and, if it is fixed, of uploads."""
    upload = plan.config.weights
    for setting, host, port in (
        ("http_options.port", plan.host, plan.port),
        ("weights.upload_port", upload.upload_host, upload.upload_port),
    ):
        if port and (why := machine.why_not_bound(host, port)) is not None:
            yield Problem(f"port {port}", why, f"{setting}: another, or end that")


def _certificates(plan: Plan) -> Iterator[Problem]:
    for settings, certificate in (
        ("http_options.ssl_certfile and ssl_keyfile", plan.certificate),
        ("weights.upload_ssl_certfile and upload_ssl_keyfile", plan.config.weights.upload_certificate),
    ):
        if certificate is not None:
            try:
                require_certificate(*certificate, settings)
            except ValueError as error:
                yield Problem("certificate", str(error), f"{settings}: files on this machine")


def _gb(nbytes: int) -> str:
    """Format a size in decimal gigabytes."""
    return f"{nbytes / 1e9:.1f} GB"
