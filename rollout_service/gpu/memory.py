"""GPU memory that a trainer shares with the ingest of its machine, by CUDA's IPC handles.

It uses cuda-bindings, which comes with torch for CUDA: memory of torch's own allocator has no IPC handle with
``expandable_segments``. ``cudaIpcOpenMemHandle`` also opens memory of a GPU that the process does not see, for example
because Ray has set ``CUDA_VISIBLE_DEVICES``. It is mapped for the GPU that the process uses.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE``. The bindings give a handle's address, not its bytes."""


def _bindings() -> tuple[Any, Any]:
    """Return CUDA's runtime and driver bindings. Raises OSError."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise OSError(f"the package cuda-bindings, which comes with torch for CUDA, is not here: {error}") from error
    return runtime, driver


def _call(name: str, *arguments: object) -> Any:
    """Call a function of CUDA's runtime and return its result. Raises OSError if it fails."""
    runtime, _ = _bindings()
    code, *result = getattr(runtime, name)(*arguments)
    if code != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # otherwise a later call would report it
        _, text = runtime.cudaGetErrorString(code)
        raise OSError(f"{name}: {text.decode()} ({code.name})")
    return result[0] if result else None


def _use(device: int) -> None:
    """Set this thread's GPU, for the bindings and for torch."""
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
        """Free the memory. May be called again. No process may be using it."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            import torch

            # restores the thread's own device, since it may be the trainer's thread
            with torch.cuda.device(self._device):
                _call("cudaFree", pointer)


class OtherGpuMemory:
    """An allocation of another process, mapped for this one's first GPU."""

    def __init__(self, handle: str, nbytes: int) -> None:
        """``nbytes``: maximum number of bytes read. Raises OSError if CUDA does not open it, or it is smaller."""
        runtime, driver = _bindings()
        self.nbytes = nbytes
        _use(0)
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), bytes.fromhex(handle), HANDLE_BYTES)
        self._pointer: int | None = int(_call("cudaIpcOpenMemHandle", opened, runtime.cudaIpcMemLazyEnablePeerAccess))
        # a copy beyond its end would make the GPU unusable for this process until it ends
        code, base, size = driver.cuMemGetAddressRange(self._pointer)
        if code != driver.CUresult.CUDA_SUCCESS or int(base) + int(size) < self._pointer + nbytes:
            self.close()
            raise OSError(f"the memory has {size} bytes, and not the {nbytes} that were announced ({code.name})")

    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory of this process for copies, uint8 [nbytes]."""
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
        """Unmap the memory. May be called again. No copy from it may be running."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            _use(0)
            _call("cudaIpcCloseMemHandle", pointer)


class _CudaArray:
    """Bare memory in a form that torch accepts:
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
