"""What is sent, when its last byte came, and what becomes of a file that holds other cases."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import results
from benchmarks.update_live import Case, LastByte, add_to_file, stored, table_of_tensors


def test_the_table_says_what_the_files_hold_in_their_order(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2, 3).bfloat16(), "a": torch.ones(4).bfloat16()}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.ones(1).bfloat16()}, tmp_path / "model-2.safetensors")
    sent = [(name, tuple(tensor.shape)) for name, tensor in stored(tmp_path)]
    assert [(entry.name, entry.shape) for entry in table_of_tensors(tmp_path)] == sent
    assert {name for name, _ in sent} == {"a", "b", "c"}


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
    content = json.loads(results.path("update").read_text())
    assert [case["door"] for case in content["cases"]] == ["device", "path", "parts"]
    assert content["cases"][1]["all_live_s"] == [2.0]
    assert content["concurrent"] == 64
    assert "update_live" in content["command"]
