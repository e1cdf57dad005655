"""Run tests on a GPU and keep what came of each.

    python -m benchmarks.gpu_tests tests/gpu
    python -m benchmarks.gpu_tests --name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py
    python -m benchmarks.gpu_tests --name tests_gpu_channel -- tests/gpu/test_engine.py -k "channels and fp8_channel"

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
