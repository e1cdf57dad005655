"""Code that runs in a process of its own: the one of the tests may have the session's service."""

import asyncio
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


async def run_apart(code: str, *arguments: str) -> list[str]:
    """Run Python code with these arguments. Return the lines that it prints. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()
