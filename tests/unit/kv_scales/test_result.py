"""What was settled of a version stands beside its manifest, whole or not at all."""

import json
from pathlib import Path

import pytest

from rollout_service.errors import LogCorrupt
from rollout_service.kv_scales.result import SETTLED_FILE, KVScaleResult, read_result, write_result
from rollout_service.store.durable_io import write_sealed
from tests.unit.kv_scales.measured import LAYER, scales_of

SETTLED = KVScaleResult(
    version=3,
    scales=scales_of(1, 2, 0.1),
    replica_id="r1",
    tokens=640,
    largest={LAYER: (448.0, 896.0, 44.8)},
)
FAILED = KVScaleResult(version=0, scales=None, replica_id="r1", tokens=1, error="zero\nthroughout")


@pytest.mark.parametrize("settled", [SETTLED, FAILED], ids=["measured", "failed"])
def test_what_is_written_is_read_again(tmp_path: Path, settled: KVScaleResult) -> None:
    write_result(tmp_path, settled)
    assert read_result(tmp_path) == settled
    assert [path.name for path in tmp_path.iterdir()] == [SETTLED_FILE]


def test_nothing_was_settled_where_there_is_no_file_or_no_folder(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None and read_result(tmp_path / "7") is None


def test_what_a_crash_left_half_written_does_not_count(tmp_path: Path) -> None:
    (tmp_path / f".{SETTLED_FILE}.tmp").write_text('{"version": 3, "sca')
    assert read_result(tmp_path) is None
    write_result(tmp_path, SETTLED)
    assert read_result(tmp_path) == SETTLED and [path.name for path in tmp_path.iterdir()] == [SETTLED_FILE]


def test_a_file_that_is_torn_or_has_a_bit_flipped_anywhere_is_corrupt_by_name(tmp_path: Path) -> None:
    write_result(tmp_path, SETTLED)
    path = tmp_path / SETTLED_FILE
    sound = path.read_bytes()
    torn = [sound[:end] for end in range(len(sound) - 1)]  # without its last newline it is whole
    flipped = [sound[:i] + bytes([sound[i] ^ bit]) + sound[i + 1 :] for i in range(len(sound) - 1) for bit in (4, 128)]
    for damaged in torn + flipped:
        path.write_bytes(damaged)
        with pytest.raises(LogCorrupt, match=str(path)):
            read_result(tmp_path)


def test_a_file_of_another_release_is_corrupt_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    write_sealed(tmp_path / SETTLED_FILE, SETTLED.model_dump_json().replace('"tokens"', '"positions"'))
    with pytest.raises(LogCorrupt, match=rf"{SETTLED_FILE} does not parse(.|\n)*positions"):
        read_result(tmp_path)


@pytest.mark.parametrize("how", ["measured", "kept", "failed"])
def test_a_file_from_when_scales_could_be_kept_is_read(tmp_path: Path, how: str) -> None:
    before = {**SETTLED.model_dump(), "how": how, "drift": 0.5, "saturated": 0.01}
    write_sealed(tmp_path / SETTLED_FILE, json.dumps(before))
    assert read_result(tmp_path) == SETTLED
