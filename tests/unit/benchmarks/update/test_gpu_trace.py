"""What a trace says a GPU did."""

from typing import Any

import pytest

from benchmarks.update.gpu_trace import summary


def event(cat: str, name: str, start: float, micros: float, nbytes: int = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": micros, "args": {"bytes": nbytes} if nbytes else {}}


def test_work_that_overlaps_is_counted_once_as_busy() -> None:
    found = summary(
        [
            event("kernel", "quantize", 100, 10),
            event("gpu_memcpy", "DtoH", 105, 20, 4000),
            event("gpu_memcpy", "DtoH", 200, 10, 2000),
            event("cuda_runtime", "cudaStreamSynchronize", 90, 150),
            event("cuda_runtime", "cudaLaunchKernel", 90, 5),
            event("cpu_op", "aten::empty", 0, 1000),
        ]
    )
    assert found["span_s"] == pytest.approx(110e-6) and found["busy_s"] == pytest.approx(35e-6)
    assert list(found["work"]) == ["DtoH", "quantize"]
    assert found["work"]["DtoH"] == {"count": 2, "seconds": pytest.approx(30e-6), "bytes": 6000}
    assert list(found["calls"]) == ["cudaStreamSynchronize", "cudaLaunchKernel"]


def test_of_a_gpu_that_did_nothing_there_is_nothing_to_say() -> None:
    assert summary([event("cpu_op", "aten::empty", 0, 1)]) == {}
