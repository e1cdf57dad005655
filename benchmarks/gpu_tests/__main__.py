"""Run tests on a GPU and keep what came of each.

    python -m benchmarks.gpu_tests tests/gpu
    python -m benchmarks.gpu_tests --name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py
    python -m benchmarks.gpu_tests --name tests_gpu_nccl tests/gpu/test_weight_transfer.py
    python -m benchmarks.gpu_tests --name tests_gpu_ep tests/gpu/test_expert_parallel.py
    python -m benchmarks.gpu_tests --name tests_gpu_routes tests/gpu/test_routed_experts.py
    python -m benchmarks.gpu_tests --name tests_gpu_memory tests/gpu/test_cuda_ipc.py tests/gpu/test_digests.py \
        tests/gpu/test_staging.py
    python -m benchmarks.gpu_tests --name tests_gpu_plans tests/gpu/test_soundness.py tests/gpu/test_cuda_ipc.py
    python -m benchmarks.gpu_tests --name tests_gpu_engine tests/gpu/test_engine.py tests/gpu/test_staging.py \
        tests/gpu/test_sleep.py
    python -m benchmarks.gpu_tests --name tests_gpu_fake_quant tests/gpu/test_fake_quant.py
    python -m benchmarks.gpu_tests --name tests_gpu_attention tests/gpu/test_fp8_decode.py \
        tests/gpu/test_group_attention.py
    python -m benchmarks.gpu_tests --name tests_gpu_groups tests/gpu/test_group_attention.py \
        tests/gpu/test_fp8_decode.py
    python -m benchmarks.gpu_tests --name tests_gpu_groups_tp2 -- tests/gpu/test_group_attention.py \
        -k "engines_logprobs and 128-2"
    python -m benchmarks.gpu_tests --name tests_gpu_delta tests/gpu/test_delta.py
    python -m benchmarks.gpu_tests --name tests_gpu_pushes tests/gpu/test_convert.py tests/gpu/test_cuda_ipc.py \
        tests/gpu/test_delta.py tests/gpu/test_log_in_memory.py
    python -m benchmarks.gpu_tests --name tests_gpu_penalties tests/gpu/test_partial_penalties.py \
        tests/gpu/test_sampling_mask.py
    python -m benchmarks.gpu_tests --name tests_gpu_channel -- tests/gpu/test_engine.py -k "channels and fp8_channel"
    python -m benchmarks.gpu_tests --name tests_gpu_quantizer -- tests/gpu/test_quantizer.py \
        -k "rows or mantissas or real_models or round"

Writes benchmarks/results/<GPU>/<name>.json after every test, whatever the number of GPUs: a host may be taken
back at any moment. Exits as pytest does.
"""

from typing import Annotated, Any

import pytest
import typer

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.gpu_tests.recorder import Recorder


def main(
    tests: Annotated[list[str], typer.Argument(help="Files or tests, as for pytest.")],
    name: Annotated[str, typer.Option(help="Of the result file.")] = "tests_gpu",
) -> None:
    """Run them in this process, and write the result."""

    def write(content: dict[str, Any]) -> None:
        results.write(name, content, machine_name=results.gpu())

    raise typer.Exit(pytest.main(["-v", *tests], plugins=[Recorder(write)]))


if __name__ == "__main__":
    run(main)
