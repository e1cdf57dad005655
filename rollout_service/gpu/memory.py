"""Memory of a GPU that a trainer shares with the ingest of its own machine, by handles of CUDA for other processes.

By cuda-bindings, which comes with torch for CUDA: memory of torch's own allocator has no such handle where
``expandable_segments`` is set. ``cudaIpcOpenMemHandle`` also opens what lies on a GPU that the process does not see, as
where Ray has set ``CUDA_VISIBLE_DEVICES``: it is mapped for the GPU that the process uses.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE``. The bindings give a handle's address and not its bytes."""


def _bindings() -> tuple[Any, Any]:
    """CUDA's runtime and driver. Raises OSError."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise OSError(f"the package cuda-bindings, which comes with torch for CUDA, is not here: {error}") from error
    return runtime, driver


def _call(name: str, *arguments: object) -> Any:
    """Result of a function of CUDA's runtime. Raises OSError if it fails."""
    runtime, _ = _bindings()
    code, *result = getattr(runtime, name)(*arguments)
    if code != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # or a later call would report it
        _, text = runtime.cudaGetErrorString(code)
        raise OSError(f"{name}: {text.decode()} ({code.name})")
    return result[0] if result else None


def _use(device: int) -> None:
    """Make a GPU this thread's, for the bindings as for torch."""
    import torch

    torch.cuda.set_device(device)
    _call("cudaSetDevice", device)


class OwnGpuMemory:
    """An allocation of this process, on its current GPU."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        import torch

        if not torch.cuda.is_available():  # torch's own errors are of several kinds
            raise OSError("this process sees no GPU")
        torch.cuda.init()
        self._device = torch.cuda.current_device()
        _use(self._device)
        self.nbytes = nbytes
        self._pointer: int | None = int(_call("cudaMalloc", nbytes))
        try:
            made = _call("cudaIpcGetMemHandle", self._pointer)
            self.handle: str = ctypes.string_at(made.getPtr(), HANDLE_BYTES).hex()
        except OSError:
            self.free()
            raise
        self.tensor: torch.Tensor = torch.as_tensor(_CudaArray(self._pointer, nbytes), device=f"cuda:{self._device}")
        """uint8 [nbytes]: a view of it."""
        self.gpu = str(torch.cuda.get_device_properties(self._device).uuid)

    def free(self) -> None:
        """Give it back. Again does no harm. Nobody may be using it, in this process or another."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            import torch

            with torch.cuda.device(self._device):  # the thread, which may be the trainer's, keeps its own
                _call("cudaFree", pointer)


class OtherGpuMemory:
    """An allocation of another process, mapped for this one's first GPU."""

    def __init__(self, handle: str, nbytes: int) -> None:
        """``nbytes``: of it, that are read at most. Raises OSError if CUDA does not open it, or it is smaller."""
        runtime, driver = _bindings()
        self.nbytes = nbytes
        _use(0)
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), bytes.fromhex(handle), HANDLE_BYTES)
        self._pointer: int | None = int(_call("cudaIpcOpenMemHandle", opened, runtime.cudaIpcMemLazyEnablePeerAccess))
        # a copy from beyond its end would leave this process without a GPU until it ends
        code, base, size = driver.cuMemGetAddressRange(self._pointer)
        if code != driver.CUresult.CUDA_SUCCESS or int(base) + int(size) < self._pointer + nbytes:
            self.close()
            raise OSError(f"the memory has {size} bytes, and not the {nbytes} that were announced ({code.name})")

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of this process to copy to, uint8 [nbytes]."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Queue a copy of its bytes from ``start`` on to ``target``, uint8 on this GPU, on the current stream."""
        import torch

        assert self._pointer is not None, "it was closed"
        runtime, _ = _bindings()
        stream = torch.cuda.current_stream(target.device).cuda_stream
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        _call("cudaMemcpyAsync", target.data_ptr(), self._pointer + start, target.nbytes, kind, stream)

    def close(self) -> None:
        """Unmap it. Again does no harm. Nothing may be copied from it any more."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            _use(0)
            _call("cudaIpcCloseMemHandle", pointer)


class _CudaArray:
    """Bare memory, as torch takes it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
