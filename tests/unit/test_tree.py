"""The tree keeps the sizes that make it readable."""

import ast
import statistics
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rollout_service"

MOST_LINES_OF_A_FILE, P90_LINES_OF_A_FILE = 430, 300
MOST_LINES_OF_A_FUNCTION, P90_LINES_OF_A_FUNCTION = 80, 30


def function_lengths(source: str) -> dict[str, int]:
    """Lines of every function, decorators excluded, by name and first line."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def p90(lengths: list[int]) -> float:
    return statistics.quantiles(lengths, n=10, method="inclusive")[-1]


def files() -> dict[str, int]:
    """Lines of every file of the package."""
    return {name: len(source.splitlines()) for name, source in sources().items()}


def functions() -> dict[str, int]:
    """Lines of every function of the package."""
    return {
        f"{name}:{function}": length
        for name, source in sources().items()
        for function, length in function_lengths(source).items()
    }


def sources() -> dict[str, str]:
    return {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}


def test_no_file_is_too_long() -> None:
    assert {name: lines for name, lines in files().items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_most_files_are_short() -> None:
    assert p90(list(files().values())) <= P90_LINES_OF_A_FILE


def test_no_function_is_too_long() -> None:
    assert {name: lines for name, lines in functions().items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_most_functions_are_short() -> None:
    assert p90(list(functions().values())) <= P90_LINES_OF_A_FUNCTION


def test_the_length_of_a_function_counts_its_body_and_those_inside_it() -> None:
    source = "def outer():\n    async def inner():\n        pass\n\n    return inner\n"
    assert function_lengths(source) == {"outer:1": 5, "inner:2": 2}
