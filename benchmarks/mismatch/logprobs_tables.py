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
NAMES = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "qwen3_30b_a3b": "30B-A3B, 2 layers, random"}


def table(cases: list[Json]) -> str:
    """A line for each engine with its trainer, and of each model k3 and the largest \\|lr\\|."""
    models = [model for model in NAMES if any(case["model"] == model for case in cases)]
    found = {(case["engine"], case["model"]): case for case in cases}
    titles = [title for model in models for title in (f"{NAMES[model]}: k3", "max \\|lr\\|")]
    rows = []
    for engine in dict.fromkeys(engine for engine, _ in found):
        figures = [figure for model in models for figure in _figures(found.get((engine, model)))]
        rows.append([engine, *figures])
    return markdown_table(["engine, trainer", *titles], rows)


def _figures(case: Json | None) -> tuple[str, str]:
    return ("", "") if case is None else (f"{case['k3']:.1e}" if case["k3"] else "0", f"{case['abs_diff_max']:.2f}")


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
