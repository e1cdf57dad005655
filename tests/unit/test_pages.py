"""Each code block of README.md and docs/ says what exists: settings, commands, modules, methods and fields.

A block that cannot be checked stands behind ``<!-- not run: the reason -->``.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

from rollout_service.cli.main import app
from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.protocol.mismatch import MismatchReport

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>\S[^\n]*) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S
)
CLIENTS = {"client": (RolloutClient, SyncRolloutClient)}
PROMPT = re.compile(r"^\w*\$ +")
OTHERS = {
    *("chmod", "cp", "curl", "docker", "export", "find", "kubectl", "mkdir", "mv", "openssl", "pip", "ray", "scp"),
    *("serve", "ssh"),
}
"""Programs that are not ours: their arguments are not checked."""


@dataclass(frozen=True)
class Block:
    """One fenced block; ``reason``: why it is not checked."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        name = str(page.relative_to(PROJECT))
        yield Block(name, line, found["language"], found["text"], found["reason"])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> pytest.MarkDecorator:
    blocks = [block for block in BLOCKS if block.language in languages and block.reason is None]
    return pytest.mark.parametrize("block", blocks, ids=[f"{block.page}:{block.line}" for block in blocks])


def test_every_block_is_checked_or_says_why_not():
    checked = {"python", "py", "yaml", "console", "bash", "json", "mermaid"}  # a drawing runs nothing
    assert [f"{b.page}:{b.line}" for b in BLOCKS if b.reason is None and b.language not in checked] == []
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert 2 * len(BLOCKS) == fences


@of("python", "py")
def test_python_names_what_exists(block):
    compile(block.text, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("rollout_service", "examples")):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            check_call(ast.unparse(node.func.value), node.func.attr, node)


def check_call(owner: str, method: str, call: ast.Call) -> None:
    """Raise for a method of a client that there is not, or an argument that it does not take."""
    for client in CLIENTS.get(owner, ()):
        signature = inspect.signature(getattr(client, method))
        if all(keyword.arg for keyword in call.keywords) and not any(isinstance(a, ast.Starred) for a in call.args):
            signature.bind(None, *call.args, **{str(keyword.arg): None for keyword in call.keywords})


@of("yaml")
def test_yaml_is_a_deployment_or_sections_of_its_args(block):
    document = yaml.safe_load(block.text)
    if "applications" not in document:
        ServiceConfig.model_validate({"model": {"path": "model"}} | document)
        return
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    assert application["import_path"] == "rollout_service.app:build"
    ServiceConfig.model_validate(application["args"])


def test_a_block_for_serve_run_is_a_whole_file():
    files = [block for block in BLOCKS if block.language == "yaml" and "serve run" in block.text.partition("\n")[0]]
    assert len(files) == 5
    assert [block.page for block in files if "applications" not in yaml.safe_load(block.text)] == []


@of("json")
def test_json_is_a_request(block):
    MismatchReport.model_validate_json(block.text)


@of("console", "bash")
def test_commands_exist(block):
    lines = block.text.replace("\\\n", " ").splitlines()
    prompts = [line for line in lines if PROMPT.match(line)]
    for line in prompts or lines:
        for command in re.split(r"\s(?:&&|\|)\s", PROMPT.sub("", line)):
            check_command(shlex.split(command, comments=True))


def check_command(words: list[str]) -> None:
    while words and re.match(r"\w+=", words[0]):  # variables of its environment
        words = words[1:]
    if not words:
        return
    program = Path(words[0]).name
    if program == "make":
        assert re.search(rf"^{words[1]}(?:$| .*:|:)", (PROJECT / "Makefile").read_text(), re.M), words
    elif program == "python":
        assert words[1] == "-m" and importlib.util.find_spec(words[2]), words
    elif program == "rollout-service":
        check_ours(words[1:])
    else:
        assert program in OTHERS, words


def check_ours(words: list[str]) -> None:
    """Parse a command line of ours. Raises click's UsageError."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, words


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted({*PAGES, *PROJECT.glob("*.md"), *PROJECT.glob("benchmarks/*.md")}))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_journeys_name_files_that_are_there():
    text = (PROJECT / "docs/architecture.md").read_text()
    journeys = text[text.index("## Three journeys") : text.index("## Who may call")]
    missing, folder = [], ""
    for name in re.findall(r"`([a-z_/]+\.py)`", journeys):
        folder = name.rpartition("/")[0] or folder
        file = f"rollout_service/{folder}/{name.rpartition('/')[2]}"
        missing += [] if (PROJECT / file).is_file() else [file]
    assert missing == []


CONTRACT = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/\S+?\.py)\)", (PROJECT / "docs/contract.md").read_text())


def test_the_contract_names_tests():
    assert len(CONTRACT) >= 10


@pytest.mark.parametrize(("name", "file"), CONTRACT)
def test_a_test_that_the_contract_names_exists(name, file):
    tree = ast.parse((PROJECT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
