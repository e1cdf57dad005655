"""Makes the tables of docs/numerics.md from the results of ``benchmarks.mismatch.logprobs``, on the CPU and on a GPU.

python -m benchmarks.mismatch.logprobs_tables
"""

from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.marked import markdown_table, with_part
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json

PAGE, RESULT = PROJECT / "docs/numerics.md", "mismatch_logprobs"
MACHINES = ("cpu-2-cores", "h200")
NAMES = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_30b_a3b": "30B-A3B, 2 layers, random",
    "qwen2": "Qwen2",
    "llama": "Llama, Mistral",  # the same layers
}


def table(cases: list[Json]) -> str:
    """A line for each engine with its trainer, and each model's k3."""
    models = [model for model in NAMES if any(case["model"] == model for case in cases)]
    found = {(case["engine"], case["model"]): case for case in cases}
    rows = [
        [engine, *(_k3(found.get((engine, model))) for model in models)]
        for engine in dict.fromkeys(engine for engine, _ in found)
    ]
    return markdown_table(["engine, trainer", *(NAMES[model] for model in models)], rows)


def _k3(case: Json | None) -> str:
    if case is None:
        return ""
    return f"{case['k3']:.1e}" if case["k3"] else "0"


def page() -> str:
    """The page with the tables of all machines."""
    made = PAGE.read_text()
    for machine in MACHINES:
        cases = sorted(results.cases(RESULT, machine_name=machine), key=lambda case: str(case["engine"]))
        made = with_part(made, f"benchmarks/mismatch/logprobs_tables.py of {machine}", table(cases))
    return made


def main() -> None:
    """Write the tables."""
    PAGE.write_text(page())
    Console(soft_wrap=True).print(f"wrote {PAGE}")


if __name__ == "__main__":
    run(main)
