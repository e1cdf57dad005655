"""What is sent, when its last byte came, and what becomes of a file that holds other cases."""

import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.update.live import Case, LastByte, keep


def test_the_last_byte_is_that_of_the_last_part() -> None:
    last = LastByte()
    last.progress(5, 10)
    assert last.at is None
    last.progress(10, 10)
    assert last.at is not None
    assert last.nbytes == 10


def test_a_case_replaces_that_of_its_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for case in (Case("m", "path", None), Case("m", "parts", None), Case("m", "parts", None, "calibrate")):
        keep(case, concurrent=8)
    keep(Case("m", "parts", None, all_live_s=[2.0]), concurrent=64)
    found = json.loads(results.path("update_live").read_text())["cases"]
    assert [(case["door"], case["scales_policy"]) for case in found] == [
        ("path", "reuse"),
        ("parts", "calibrate"),
        ("parts", "reuse"),
    ]
    assert (found[-1]["all_live_s"], found[-1]["concurrent"]) == ([2.0], 64)


def test_what_is_durable_behind_is_another_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    keep(Case("m", "path", None), concurrent=8)
    kept = json.loads(results.path("update_live").read_text())
    for case in kept["cases"]:
        del case["durability"]  # as in results of before
    results.path("update_live").write_text(json.dumps(kept))
    keep(Case("m", "path", None, durability="behind", log="memory"), concurrent=8)
    keep(Case("m", "path", None, log="memory"), concurrent=8)
    found = json.loads(results.path("update_live").read_text())["cases"]
    assert [(case["durability"], case["log"]) for case in found] == [("behind", "memory"), ("before_live", "memory")]
