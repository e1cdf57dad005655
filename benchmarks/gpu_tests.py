"""Run tests on a GPU and keep what came of each.

    python -m benchmarks.gpu_tests --name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py

Writes benchmarks/results/<GPU>/<name>.json, whatever the number of GPUs, and exits as pytest does.
"""

import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import results

ROOT = Path(__file__).parents[1]


def case_of(element: ET.Element) -> dict[str, Any]:
    """One test of pytest's JUnit file: name, outcome, seconds, and the properties that it recorded."""
    outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    outcome = next((outcomes[child.tag] for child in element if child.tag in outcomes), "passed")
    file = element.attrib["classname"].replace(".", "/") + ".py"
    case = {
        "test": f"{file}::{element.attrib['name']}",
        "outcome": outcome,
        "seconds": round(float(element.attrib["time"]), 1),
    }
    return case | {each.attrib["name"]: value_of(each.attrib["value"]) for each in element.iter("property")}


def value_of(text: str) -> object:
    """A recorded number, or list of numbers; pytest writes them as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def content_of(junit: Path) -> dict[str, Any]:
    """What a result file says of one run."""
    cases = [case_of(element) for element in ET.parse(junit).iter("testcase")]
    counts = {outcome: sum(case["outcome"] == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    return counts | {"tests": cases}


def main(
    tests: Annotated[list[str], typer.Argument(help="Files or tests, as for pytest.")],
    name: Annotated[str, typer.Option(help="Of the result file.")] = "tests_gpu",
) -> None:
    """Run them in a process of their own, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-o", "junit_family=xunit1", f"--junitxml={junit}", *tests]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not junit.exists():
            raise typer.Exit(code or 1)
        content = content_of(junit)
    print(f"wrote {results.write(name, content, module='gpu_tests', machine_name=results.gpu())}")
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
