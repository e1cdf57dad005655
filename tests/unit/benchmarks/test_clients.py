"""The table of docs/clients.md is what driving the service with them has found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.clients.recorder import ClientRecorder
from benchmarks.clients.released import CLIENTS
from benchmarks.clients.table import PAGE
from benchmarks.common.paths import PROJECT

FOLDERS = {path.stem for path in (PROJECT / "requirements/clients").glob("*.txt")}


def test_every_set_of_pins_is_a_clients():
    assert {client.folder for client in CLIENTS if client.folder} == FOLDERS


def test_links_of_rows_lead_to_pages():
    for client in CLIENTS:
        for part, link in client.links.items():
            assert f"[{part}]({link})" in client.linked and (PAGE.parent / link).is_file()


OUTCOMES = """
import pytest

@pytest.mark.client("ART")
@pytest.mark.parametrize("outcome", {outcomes!r})
def test_of_it(outcome):
    if outcome == "skip":
        pytest.skip("not installed")
    assert outcome == "pass"

def test_of_nobody():
    assert False
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., ClientRecorder]:
    """What is recorded of a client with such tests, in a run of pytest."""

    def run(outcomes: list[str], *chosen: str) -> ClientRecorder:
        file = tmp_path / f"test_{'_'.join(outcomes)}.py"  # pytest imports a name once
        file.write_text(OUTCOMES.format(outcomes=outcomes))
        recorder = ClientRecorder()
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", str(PROJECT / "pyproject.toml")]
        pytest.main([str(file), *options, *chosen], plugins=[recorder])
        return recorder

    return run
