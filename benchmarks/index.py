"""The table of benchmarks/README.md: which command made which result, and one figure of each.

    python -m benchmarks.index            says what is wrong and exits with 1 if table and results do not agree
    python -m benchmarks.index --write    makes the table anew

A result has a row if its benchmark stands in ``BENCHMARKS``; the figure is taken out of the result by a function of
``headlines.py``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import headlines
from benchmarks.common.marked import with_part, write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.headlines import Json

README = PROJECT / "benchmarks/README.md"
PART = "python -m benchmarks.index --write"


@dataclass(frozen=True)
class Benchmark:
    """A command, and the result that it writes on each machine."""

    module: str
    """Below ``benchmarks``."""
    headline: Callable[[Json], str]
    arguments: str = ""
    """Without which it writes another result, or none."""
    before: str = ""
    """The command that must have run before."""
    result: str = ""
    """Below the machine's folder; as the module if not given."""
    awaited: bool = False
    """It was not run yet where it has to run; it has no row until it was."""

    @property
    def command(self) -> str:
        """As it is typed."""
        command = f"python -m benchmarks.{self.module} {self.arguments}".rstrip()
        return f"{self.before} && {command}" if self.before else command

    @property
    def name(self) -> str:
        """Of the result: ``update_live``."""
        return self.result or self.module.replace(".", "_")

    def exists(self) -> bool:
        """Whether there is such a module."""
        path = PROJECT / "benchmarks" / self.module.replace(".", "/")
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


BENCHMARKS = (
    Benchmark("rollout.throughput", headlines.throughput),
    Benchmark("rollout.memory", headlines.memory),
    Benchmark("rollout.overhead", headlines.overhead),
    Benchmark("rollout.reply_json", headlines.reply_json),
    Benchmark("rollout.chat", headlines.chat),
    Benchmark("rollout.length_bias", headlines.length_bias),
    Benchmark("rollout.decode_step", headlines.decode_step),
    Benchmark("rollout.streams", headlines.streams, result="streams"),
    Benchmark("update.engine", headlines.engine_update),
    Benchmark("update.live", headlines.live_update),
    Benchmark("update.shipped", headlines.shipped),
    Benchmark("update.sleep", headlines.sleeping),
    Benchmark("update.delta", headlines.delta),
    Benchmark("quantizer", headlines.quantizer),
    Benchmark("kernels.attention", headlines.attention),
    Benchmark("kernels.linear", headlines.linear),
    Benchmark("kernels.group_attention", headlines.grouped_kernels),
    Benchmark("kernels.fp8_decode", headlines.fp8_decode),
    Benchmark("group_attention", headlines.group_attention),
    Benchmark("kernels.decode_profile", headlines.decode_profile),
    Benchmark("mismatch.logprobs", headlines.logprobs),
    Benchmark("mismatch.layers", headlines.layers),
    Benchmark("mismatch.kv_scales", headlines.kv_scales),
    Benchmark("training.tis_ablation", headlines.tis_ablation, "--publish"),
    Benchmark(
        "training.tis_ablation",
        headlines.tis_ablation,
        "--task addition --report --publish",
        before="python -m benchmarks.training.tis_ablation --task addition --arms bf16,fp8_tis,fp8",
        result="training_tis_ablation_addition",
        awaited=True,
    ),
    Benchmark("training.demo", headlines.demo, before="make demo"),
    Benchmark("training.demo_fake_quant", headlines.demo_fake_quant),
    Benchmark(
        "trainers.trl",
        headlines.trained,
        "--side ours",
        before="python -m benchmarks.trainers.trl --prepare",
        result="trainers",
    ),
    Benchmark(
        "trainers.verl",
        headlines.trained,
        "--side ours",
        before="python -m benchmarks.trainers.verl --prepare",
        awaited=True,
    ),
    Benchmark("autoscaling", headlines.autoscaling),
    Benchmark("faults", headlines.faults),
    Benchmark("soak", headlines.soak),
    Benchmark("clients", headlines.clients),
    Benchmark("families", headlines.models, result="models"),
    Benchmark("families.published", headlines.published, result="published"),
    Benchmark("gpu_tests", headlines.gpu_tests, "tests/gpu", result="tests_gpu"),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py",
        result="tests_gpu_tp2",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_nccl tests/gpu/test_weight_transfer.py",
        result="tests_gpu_nccl",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_ep tests/gpu/test_expert_parallel.py",
        result="tests_gpu_ep",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_routes tests/gpu/test_routed_experts.py",
        result="tests_gpu_routes",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_memory tests/gpu/test_cuda_ipc.py tests/gpu/test_digests.py tests/gpu/test_staging.py",
        result="tests_gpu_memory",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_plans tests/gpu/test_soundness.py tests/gpu/test_cuda_ipc.py",
        result="tests_gpu_plans",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_engine tests/gpu/test_engine.py tests/gpu/test_staging.py tests/gpu/test_sleep.py",
        result="tests_gpu_engine",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_fake_quant tests/gpu/test_fake_quant.py",
        result="tests_gpu_fake_quant",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_groups tests/gpu/test_group_attention.py tests/gpu/test_fp8_decode.py",
        result="tests_gpu_groups",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        '--name tests_gpu_groups_tp2 -- tests/gpu/test_group_attention.py -k "engines_logprobs and 128-2"',
        result="tests_gpu_groups_tp2",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_delta tests/gpu/test_delta.py",
        result="tests_gpu_delta",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_pushes tests/gpu/test_convert.py tests/gpu/test_cuda_ipc.py tests/gpu/test_delta.py "
        "tests/gpu/test_log_in_memory.py",
        result="tests_gpu_pushes",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_penalties tests/gpu/test_partial_penalties.py tests/gpu/test_sampling_mask.py",
        result="tests_gpu_penalties",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        '--name tests_gpu_channel -- tests/gpu/test_engine.py -k "channels and fp8_channel"',
        result="tests_gpu_channel",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        '--name tests_gpu_quantizer -- tests/gpu/test_quantizer.py -k "rows or mantissas or real_models or round"',
        result="tests_gpu_quantizer",
    ),
    Benchmark(
        "gpu_tests",
        headlines.gpu_tests,
        "--name tests_gpu_attention tests/gpu/test_fp8_decode.py tests/gpu/test_group_attention.py",
        result="tests_gpu_attention",
    ),
)
"""In the order of the table."""


def found_results(folder: Path) -> dict[str, list[Path]]:
    """Name → files of that name, one a machine."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/*.json")):
        name = file.relative_to(folder).with_suffix("")
        found.setdefault("/".join(name.parts[1:]), []).append(file)
    return found


def missing(folder: Path) -> Iterator[str]:
    """What lacks a row, a file or a module, in words."""
    found, names = found_results(folder), {benchmark.name for benchmark in BENCHMARKS}
    for name in found.keys() - names:
        for file in found[name]:
            yield f"{file}: no row. Give its benchmark one in BENCHMARKS of benchmarks/index.py, or delete the file"
    for benchmark in BENCHMARKS:
        if benchmark.name not in found and not benchmark.awaited:
            yield f"{benchmark.command}: no result {folder}/*/{benchmark.name}.json. Run it, or take its row out"
        if benchmark.name in found and benchmark.awaited:
            yield f"{benchmark.command}: there is a result. Take awaited out of its row in benchmarks/index.py"
        if not benchmark.exists():
            yield f"{benchmark.command}: no such module"


def table(folder: Path) -> str:
    """All rows. Raises ValueError for a result that lacks what its headline is made of."""
    lines = ["| command | headline | machine | result |", "|---|---|---|---|"]
    found = found_results(folder)
    for benchmark in BENCHMARKS:
        for file in found.get(benchmark.name, []):
            path = file.relative_to(folder)
            headline, date = figures(benchmark, file)
            lines.append(f"| `{benchmark.command}` | {headline} | {path.parts[0]} | [{date}](results/{path}) |")
    return "\n".join(lines) + "\n"


def figures(benchmark: Benchmark, file: Path) -> tuple[str, str]:
    """Headline and date of a result. Raises ValueError, with the file, if it lacks what they are made of."""
    try:
        result = json.loads(file.read_text())
        return benchmark.headline(result), result["date"]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: no headline, {type(error).__name__}: {error}") from error


def problems(folder: Path, readme: Path) -> list[str]:
    """What is wrong with the table in ``readme``, in words; nothing if it is as the results say."""
    found = sorted(missing(folder))
    try:
        if with_part(readme.read_text(), PART, table(folder)) != readme.read_text():
            found.append(f"{readme}: the table is not what the results say. Run: {PART}")
    except ValueError as error:
        found.append(str(error))
    return found


def main(write: Annotated[bool, typer.Option("--write", help="Make the table anew.")] = False) -> None:
    """Check that the table of benchmarks/README.md is what the results say; exit with 1 and say why if it is not."""
    if write:
        try:
            write_part(README, PART, table(RESULTS))
        except ValueError as error:
            typer.echo(f"not written: {error}", err=True)
    found = problems(RESULTS, README)
    for problem in found:
        typer.echo(problem.replace(f"{PROJECT}/", ""), err=True)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
