"""The table of docs/clients.md is what driving the service with them has found."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import released
from benchmarks.clients.recorder import ClientRecorder
from benchmarks.clients.released import CLIENTS, Client
from benchmarks.clients.table import PAGE, PART, RESULT, problems, table
from benchmarks.common.marked import write_part
from benchmarks.common.paths import PROJECT

FOLDERS = {path.stem for path in (PROJECT / "requirements/clients").glob("*.txt")}


def result() -> dict[str, Any]:
    return dict(json.loads(RESULT.read_text()))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page whose table is what the result says, and a copy of the result beside it."""
    (tmp_path / "clients.json").write_text(RESULT.read_text())
    page = tmp_path / "clients.md"
    page.write_text(f"<!-- made by {PART} -->\n<!-- end of {PART} -->\n")
    write_part(page, PART, table(result()["cases"]))
    return page


def found(page: Path) -> list[str]:
    return problems(page.with_name("clients.json"), page)


def test_the_page_is_up_to_date() -> None:
    assert problems(RESULT, PAGE) == []


def test_every_set_of_pins_is_a_clients() -> None:
    assert {client.folder for client in CLIENTS if client.folder} == FOLDERS


def test_links_of_rows_lead_to_pages() -> None:
    for client in CLIENTS:
        for part, link in client.links.items():
            assert f"[{part}]({link})" in client.linked and (PAGE.parent / link).is_file()


class TestProblems:
    def test_a_row_that_is_not_what_was_found_is_named(self, page: Path) -> None:
        page.write_text(page.read_text().replace("1.16.0", "1.17.0"))
        assert [PART in problem for problem in found(page)] == [True]

    def test_a_client_that_was_never_run_is_named(self, page: Path) -> None:
        cases = [case for case in result()["cases"] if case["client"] != "SkyRL"]
        page.with_name("clients.json").write_text(json.dumps({"cases": cases}))
        missing, differs = found(page)
        assert "nothing of SkyRL" in missing and PART in differs

    def test_a_client_that_fails_is_said_to_fail(self) -> None:
        [case] = [case for case in result()["cases"] if case["client"] == "SkyRL"]
        assert "**fails** (2026-01-01)" in table([{**case, "passed": False, "date": "2026-01-01"}])


class TestVersions:
    def test_of_packages_beside_the_services_own(self) -> None:
        found = Client("a", "", "", "", packages=("pytest", "httpx")).version()
        assert found == f"pytest {version('pytest')}, httpx {version('httpx')}"

    def test_of_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        info = tmp_path / "x/thing-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.5\n")
        monkeypatch.setattr(released, "INSTALLED", tmp_path)
        assert Client("a", "", "", "", folder="x", packages=("thing",)).version() == "1.5"
        assert Client("a", "", "", "", folder="x", packages=("thing",), source="abc").version() == "abc, thing 1.5"
        with pytest.raises(LookupError):
            Client("a", "", "", "", folder="x", packages=("other",)).version()

    def test_of_a_contract(self) -> None:
        assert Client("a", "", "", "", source="624b824").version() == "624b824"


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


class TestRecorder:
    def test_a_client_passes_if_all_of_its_tests_do(self, recorded: Callable[..., ClientRecorder]) -> None:
        [case] = recorded(["pass", "pass"]).cases()
        assert (case["client"], case["version"], case["tests"], case["passed"]) == ("ART", "0.5.23", 2, True)

    def test_one_failure_fails_it(self, recorded: Callable[..., ClientRecorder]) -> None:
        [case] = recorded(["pass", "fail"]).cases()
        assert not case["passed"]

    def test_one_that_was_not_all_run_keeps_its_row(self, recorded: Callable[..., ClientRecorder]) -> None:
        recorder = recorded(["pass", "skip"])
        assert list(recorder.cases()) == [] and recorder.skipped() == ["ART"]
        recorder = recorded(["pass", "pass", "pass"], "-k", "pass0")
        assert list(recorder.cases()) == [] and recorder.skipped() == ["ART"]
