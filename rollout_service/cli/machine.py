"""Facts about this machine: GPUs, ports and packages. Functions query once, and change nothing."""

import errno
import socket
import subprocess
from importlib import metadata

from rollout_service.engine.environment import is_vllm_for_cpu
from rollout_service.gpu import nvidia_smi
from rollout_service.protocol.base import Frozen


class TorchCuda(Frozen):
    """GPU support of the installed torch."""

    built_for: str | None
    """Version of CUDA; None: a build without."""
    devices: int
    """Number of GPUs that it can use, after ``CUDA_VISIBLE_DEVICES``."""
    error: str = ""
    """Reason why it can use none."""


def is_gpu_host() -> bool:
    """Return True if there is a GPU, even one that its driver does not reach."""
    try:
        return bool(nvidia_smi.gpus())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return True


def engines_on_gpus() -> bool:
    """Return True if engines that are started here use GPUs: there is one, and vLLM is not a build for the CPU."""
    return is_gpu_host() and not is_vllm_for_cpu()


def torch_cuda() -> TorchCuda:
    """Import torch, and let it look for the driver."""
    import torch

    if torch.version.cuda is None:
        return TorchCuda(built_for=None, devices=0)
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no driver, or one that is too old; the message has the reason
        return TorchCuda(built_for=torch.version.cuda, devices=0, error=" ".join(str(error).split()))
    return TorchCuda(built_for=torch.version.cuda, devices=torch.cuda.device_count())


def why_not_bound(host: str, port: int) -> str | None:
    """Return the reason why no process can listen there now; None: the port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what only lingers in TIME_WAIT is no listener
        try:
            probe.bind((host, port))
        except OSError as error:
            return "taken by another process" if error.errno == errno.EADDRINUSE else str(error)
    return None


def installed(distribution: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
