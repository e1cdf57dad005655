"""What is sent, when its last byte came, and what becomes of a file that holds other cases."""

import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.update.live import Case, LastByte, add_to_file


def test_the_last_byte_is_that_of_the_last_part() -> None:
    last = LastByte()
    last.progress(5, 10)
    assert last.at is None
    last.progress(10, 10)
    assert last.at is not None
    assert last.nbytes == 10


def test_a_case_replaces_that_of_its_door_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write(
        "update", {"concurrent": 64, "cases": [{"model": "m", "door": d, "layers": None} for d in ("device", "path")]}
    )
    add_to_file(Case("m", "path", None, all_live_s=[2.0]), {"eager": False})
    add_to_file(Case("m", "parts", None), {})
    add_to_file(Case("m", "parts", None, "calibrate"), {})
    content = json.loads(results.path("update").read_text())
    assert [case["door"] for case in content["cases"]] == ["device", "path", "parts", "parts"]
    assert content["cases"][1]["all_live_s"] == [2.0]
    assert content["concurrent"] == 64
