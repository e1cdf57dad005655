"""Checks of a machine for a deployment: each yields findings, with the settings to change."""

import math
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from rollout_service.cli import machine
from rollout_service.cli.machine import Disk, TorchCuda
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import Document, args_of
from rollout_service.config.service import AUTO
from rollout_service.engine.hardware import why_unfit
from rollout_service.gpu import nvidia_smi
from rollout_service.gpu.nvidia_smi import Gpu
from rollout_service.protocol.base import Frozen
from rollout_service.runtime.memory import Memory
from rollout_service.runtime.memory import memory as memory_here
from rollout_service.runtime.tls import require_certificate

NEAR_THE_KILLER = 0.1
"""Share of the memory below Ray's threshold that an engine's start may well use."""


class Finding(Frozen):
    """One line of the report."""

    check: str
    level: Literal["ok", "warning", "problem"]
    """``problem``: it would keep the service from starting."""
    found: str
    advice: str = ""
    """Advice: settings or actions; empty if there is none."""


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


# --- the model


def with_model(plan: Plan) -> tuple[Plan, Finding]:
    """Add the size of a version to the plan, if the model is in a folder of this machine."""
    name = "model"
    try:
        model = plan.config.model.here()
    except ValueError as error:
        return plan, Finding(check=name, level="problem", found=str(error))
    if model.repo_id is not None:
        found = f"{model.repo_id} is downloaded from {constants.ENDPOINT} at the start, if it is not here"
        return plan, Finding(check=name, level="ok", found=found)
    if model.create is not None and not model.path.exists():
        return plan, Finding(check=name, level="ok", found=f"{model.create} is made at {model.path} at the start")
    from rollout_service.cli.inspect_model import inspect_model  # seconds, for torch and transformers

    try:
        engine = plan.config.engine
        report = inspect_model(model, plan.config.quant, engine.tensor_parallel_size, engine.expert_parallel)
    except (OSError, ValueError) as error:
        return plan, Finding(check=name, level="problem", found=str(error))
    found = (
        f"{report.model}: {report.parameters / 1e9:.2f} billion parameters, a version takes {_gb(report.stored_bytes)}"
    )
    return replace(plan, version_bytes=report.stored_bytes), Finding(check=name, level="ok", found=found)


# --- GPUs


def gpus(plan: Plan) -> list[Finding]:
    """Check each GPU, the driver, and the number of GPUs."""
    try:
        listed = nvidia_smi.visible_gpus()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        advice = "repair or reload the driver, or restart the machine"
        level: Literal["warning", "problem"] = "problem" if plan.on_gpus else "warning"
        return [Finding(check="gpu", level=level, found=str(error), advice=advice)]
    if not listed and plan.on_gpus and (hidden := nvidia_smi.gpus()):
        found = f"CUDA_VISIBLE_DEVICES leaves none of the {len(hidden)} GPUs"
        return [Finding(check="gpu", level="problem", found=found, advice="CUDA_VISIBLE_DEVICES: their indices")]
    return gpu_findings(listed, machine.torch_cuda() if listed else TorchCuda(built_for=None, devices=0), plan)


def gpu_findings(listed: Sequence[Gpu], torch: TorchCuda, plan: Plan) -> list[Finding]:
    """``torch`` is only used if there are GPUs."""
    if not plan.on_gpus:
        idle = f"{len(listed)} GPUs stay idle: scaling.num_gpus is 0"
        if not listed:
            return [Finding(check="gpu", level="ok", found="none, and none is asked for: engines run on the CPU")]
        return [Finding(check="gpu", level="warning", found=idle, advice="serve run deployments/fp8_rollout.yaml")]
    if not listed:
        advice = "serve run deployments/cpu_rollout.yaml; or, if there is one, install its driver"
        return [Finding(check="gpu", level="problem", found="nvidia-smi lists none", advice=advice)]
    unfit = {gpu.index: why for gpu in listed if (why := _unfit(gpu, plan)) is not None}
    enough = len(listed) - len(unfit) >= plan.gpus_at_start
    return [
        *(_gpu_finding(gpu, unfit.get(gpu.index), enough) for gpu in listed),
        _driver_finding(listed[0].driver, torch, plan),
        *([] if enough else [_too_few(len(listed) - len(unfit), plan)]),
    ]


def _gpu_finding(gpu: Gpu, unfit: tuple[str, str] | None, enough: bool) -> Finding:
    what = f"{gpu.name}, {_gb(gpu.memory_bytes)}, compute capability {'.'.join(map(str, gpu.compute_capability))}"
    name = f"gpu {gpu.index}"
    if unfit is None:
        return Finding(check=name, level="ok", found=what)
    return Finding(check=name, level="warning" if enough else "problem", found=f"{what}: {unfit[0]}", advice=unfit[1])


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


def _driver_finding(driver: str, torch: TorchCuda, plan: Plan) -> Finding:
    if torch.built_for is None:
        advice = "STACK=gpu make setup, or pip install 'rollout-service[gpu]'"
        return Finding(check="cuda", level="problem", found="the installed torch is built for the CPU", advice=advice)
    found = f"driver {driver}, torch for CUDA {torch.built_for}"
    if torch.error or not torch.devices:
        why = torch.error or "torch sees no GPU: CUDA_VISIBLE_DEVICES leaves none"
        return Finding(check="cuda", level="problem", found=f"{found}: {why}", advice="a driver for that CUDA")
    if torch.devices < plan.gpus_at_start:
        found += f": torch sees {torch.devices} GPUs of the {plan.gpus_at_start} that are needed"
        return Finding(check="cuda", level="problem", found=found, advice="CUDA_VISIBLE_DEVICES: more of them")
    return Finding(check="cuda", level="ok", found=found)


def _too_few(usable: int, plan: Plan) -> Finding:
    tp, replicas = plan.config.engine.tensor_parallel_size, plan.replicas_at_start
    found = f"{usable} can be used, and {replicas} replicas of {tp} GPUs each need {tp * replicas}"
    advice = "engine.tensor_parallel_size and scaling.num_gpus, or scaling.min_replicas"
    if more := plan.gpus_at_start - plan.engine_gpus:
        found += f"; what the ingest asks for needs {more} more"
        advice = f"weights.ingest_num_gpus: 0; or {advice}"
    return Finding(check="gpus", level="problem", found=found, advice=advice)


def compiler(plan: Plan) -> list[Finding]:
    """Check CUDA's nvcc, if engines run on GPUs."""
    return [nvcc_finding(machine.nvcc(), plan)] if plan.on_gpus else []


def nvcc_finding(nvcc: str | None, plan: Plan) -> Finding:
    """``nvcc``: its path and version; None: not found."""
    backend = plan.config.engine.linear_backend
    if nvcc is not None:
        return Finding(check="nvcc", level="ok", found=nvcc)
    if plan.config.quant.weights != "fp8_block" or backend not in ("auto", "deep_gemm"):  # DeepGEMM is for blocks
        return Finding(check="nvcc", level="ok", found=f"none; engine.linear_backend: {backend} needs none")
    found = f"none; engine.linear_backend: {backend} compiles its kernels with it"
    return Finding(check="nvcc", level="problem", found=found, advice="engine.linear_backend: cutlass")


# --- memory


def memory(plan: Plan) -> list[Finding]:
    """Check the machine's memory."""
    return [memory_finding(memory_here(), plan)]


def memory_finding(has: Memory, plan: Plan) -> Finding:
    """Check memory: Ray kills workers above a share of it, whichever process uses it. Engines on the CPU count, too."""
    share = has.used_bytes / has.total_bytes
    engines = 0 if plan.on_gpus else plan.replicas_at_start * plan.version_bytes
    if has.used_bytes + engines > has.kill_at * has.total_bytes and share < has.kill_at:
        found = f"{_gb(has.total_bytes - has.used_bytes)} of {_gb(has.total_bytes)} free, engines take {_gb(engines)}"
        return Finding(check="memory", level="problem", found=found, advice="a smaller model, or a larger machine")
    found = (
        f"{_gb(has.total_bytes)}, {_gb(has.total_bytes - has.used_bytes)} of it free; "
        f"Ray kills workers from {has.kill_at:.0%} on, and {share:.0%} are in use"
    )
    if share < has.kill_at - NEAR_THE_KILLER:
        return Finding(check="memory", level="ok", found=found)
    level: Literal["warning", "problem"] = "problem" if share >= has.kill_at else "warning"
    return Finding(check="memory", level=level, found=found, advice="end what uses it, or take a larger machine")


# --- disks


def weights(plan: Plan) -> Iterator[Finding]:
    """Check the disk of the log."""
    config = plan.config.weights
    if config.root == AUTO:
        yield _chosen_log(plan)
        return
    try:
        root = config.root_here()
        yield weights_finding(machine.disk(root), (root / "LATEST").is_file(), plan)
    except (OSError, ValueError) as error:
        yield Finding(check="weights.root", level="problem", found=str(error), advice="another weights.root")


def _chosen_log(plan: Plan) -> Finding:
    """Return the place that the ingest would choose for the log, and its free space."""
    if not plan.version_bytes:
        found = "auto: chosen at the start, since the model is not here yet"
        return Finding(check="weights.root", level="ok", found=found)
    from rollout_service.store.log_place import log_place  # imports torch

    place = log_place(plan.config)
    if place.root == plan.config.weights.disk_root_here():
        on_disk = weights_finding(
            machine.disk(place.root), (place.root / "LATEST").is_file(), plan, "weights.disk_root"
        )
        return on_disk.model_copy(update={"found": f"{on_disk.found}; {place.why}"})
    return Finding(check="weights.root", level="ok", found=f"{place.root}: {place.why}")


def weights_finding(disk: Disk, has_log: bool, plan: Plan, setting: str = "weights.root") -> Finding:
    """Check the disk's space for the log. ``has_log``: True if there is a version 0 already."""
    config, nbytes = plan.config.weights, plan.version_bytes
    versions = config.keep_versions + 1 + len(plan.config.scaling.groups)
    found = f"{disk.folder}: {_gb(disk.free_bytes)} free"
    if not disk.writable:
        return Finding(check=setting, level="problem", found=f"{found}: not writable", advice=f"another {setting}")
    larger = f"{setting} on a larger disk"
    if nbytes > disk.free_bytes and not has_log:
        found += f"; a version takes {_gb(nbytes)}"
        return Finding(check=setting, level="problem", found=found, advice=larger)
    if nbytes * versions > disk.free_bytes and not has_log:
        found += f"; {versions} versions of {_gb(nbytes)} each take {_gb(nbytes * versions)}"
        return Finding(check=setting, level="warning", found=found, advice=larger)
    return Finding(check=setting, level="ok", found=found)


# --- ports


def ports(plan: Plan) -> Iterable[Finding]:
    """Check the ports of HTTP and, if it is fixed, of uploads."""
    upload = plan.config.weights
    yield port_finding("http_options.port", plan.port, machine.why_not_bound(plan.host, plan.port))
    if upload.upload_port:
        why = machine.why_not_bound(upload.upload_host, upload.upload_port)
        yield port_finding("weights.upload_port", upload.upload_port, why)


def port_finding(setting: str, port: int, why_not: str | None) -> Finding:
    """``why_not``: reason why no process can listen on it; None: it is free."""
    if why_not is None:
        return Finding(check=f"port {port}", level="ok", found="free")
    return Finding(check=f"port {port}", level="problem", found=why_not, advice=f"{setting}: another, or end that")


# --- TLS


def tls(plan: Plan) -> Iterator[Finding]:
    """Check the certificates of the service and of uploads, if there are any."""
    upload = plan.config.weights.upload_certificate
    if plan.certificate is not None:
        settings = "http_options.ssl_certfile and ssl_keyfile"
        yield certificate_finding("certificate", *plan.certificate, settings)
    if upload is not None:
        settings = "weights.upload_ssl_certfile and upload_ssl_keyfile"
        yield certificate_finding("certificate of uploads", *upload, settings)


def certificate_finding(check: str, certfile: Path, keyfile: Path, settings: str) -> Finding:
    """Check that a listener on this machine could use the certificate."""
    try:
        require_certificate(certfile, keyfile, settings)
    except ValueError as error:
        return Finding(check=check, level="problem", found=str(error), advice=f"{settings}: files on this machine")
    return Finding(check=check, level="ok", found=str(certfile))


CHECKS = (gpus, compiler, memory, weights, ports, tls)
"""All checks."""


def _gb(nbytes: int) -> str:
    """Format a size in decimal gigabytes."""
    return f"{nbytes / 1e9:.1f} GB"
