"""What is sent, when its last byte came, and what becomes of a file that holds other cases."""

import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.update.live import Case, LastByte, keep
from benchmarks.update.waterfall import phases
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.weights import UploadTimings


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


def test_cases_of_before_stay_beside_those_of_another_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    keep(Case("m", "parts", None), concurrent=8)
    kept = json.loads(results.path("update_live").read_text())
    for case in kept["cases"]:
        del case["staging"], case["replicas"]  # as in results of before
    results.path("update_live").write_text(json.dumps(kept))
    for staging in ("device", "device", "auto"):
        keep(Case("m", "parts", None, staging=staging), concurrent=8)
    found = json.loads(results.path("update_live").read_text())["cases"]
    assert [case["staging"] for case in found] == ["device", "auto"]


def test_stages_of_a_version_are_those_of_the_ingest_and_of_the_slowest_replica() -> None:
    case = Case("m", "cuda_ipc", None)
    uploaded = UploadTimings(receive_s=1, quantize_s=2, store_s=3, finish_s=4)
    case.add(uploaded, [UpdateTimings(stage_s=s, closed_s=6 - s, load_s=0.1) for s in (1, 2)])
    assert case.stages == [{"receive": 1, "quantize": 2, "store": 3, "finish": 4, "stage": 2, "closed": 5, "load": 0.1}]


def test_phases_of_the_picture_add_up_to_the_push() -> None:
    case = {"push_s": [3.0, 2.0, 9.0], "all_live_s": [1.5], "stage_s": [1.0], "closed_s": [0.25]}
    assert phases(case) == {
        "sent, quantized and stored": 1.5,
        "committed": 0.25,
        "staged and checked": 1.0,
        "engine closed": 0.25,
    }
