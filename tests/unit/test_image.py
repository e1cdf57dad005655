"""The Dockerfile, which cannot be built where these tests run: what it copies is there, and what it runs is ours."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Each with what follows it, as one line."""
    text = re.sub(r"^#.*\n", "", (PROJECT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def values(instruction: str) -> list[str]:
    return [value for name, value in instructions() if name == instruction]


def copied() -> list[str]:
    """Sources of COPY."""
    words = [[word for word in shlex.split(line) if not word.startswith("--")] for line in values("COPY")]
    return [source for line in words for source in line[:-1]]


def test_what_it_copies_is_there_and_sent_to_the_builder():
    sent = [line.removeprefix("!") for line in (PROJECT / ".dockerignore").read_text().split() if line[0] == "!"]
    assert copied()
    for source in copied():
        assert list(PROJECT.glob(source)), source
        assert any(fnmatch(source, pattern) for pattern in sent), source


def test_all_that_the_installation_reads_is_copied():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    for needed in (
        "pyproject.toml",
        "scripts/setup.sh",
        "rollout_service",
        project["readme"],
        *project["license-files"],
    ):
        assert needed in copied(), needed
