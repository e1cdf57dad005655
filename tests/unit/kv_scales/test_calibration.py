"""One replica measures a version's KV scales for all, once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_service.errors import LogCorrupt, NotFound
from rollout_service.kv_scales.calibration import CalibrationLease
from rollout_service.kv_scales.result import SETTLED_FILE
from tests.unit.kv_scales.measured import Calibrating, measured, scales_of

ONE, TWO = measured((448, 896, 56)), measured((1, 1, 1))
SCALES = scales_of(1, 2, 0.125)
"""Of ``ONE``."""
FIRST_TURN = CalibrationLease(scales=None, measures=True)

Restart = Callable[..., Calibrating]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Restart:
    """An ingest that starts on the log of this test."""

    def on_the_log(**calibration: Any) -> Calibrating:
        return Calibrating(tmp_path / "log", model, **calibration)

    return on_the_log


@pytest.fixture
def ingest(start: Restart) -> Calibrating:
    """It has version 0, which awaits its scales."""
    ingest = start()
    ingest.commit(0)
    return ingest


# --- turns


def test_the_first_replica_that_asks_measures_and_the_others_wait(ingest: Calibrating) -> None:
    assert ingest.turn("a", 0) == FIRST_TURN
    assert ingest.turn("b", 0) is None and ingest.turn("c", 0) is None


def test_a_replica_that_asks_again_still_has_its_turn(ingest: Calibrating) -> None:
    assert ingest.turn("a", 0) == ingest.turn("a", 0) == FIRST_TURN


def test_the_next_one_that_asks_measures_when_the_first_is_no_longer_on_its_way(ingest: Calibrating) -> None:
    ingest.turn("a", 0)
    ingest.loading.remove(("a", 0))
    assert ingest.turn("b", 0) == FIRST_TURN
    assert ingest.turn("c", 0) is None and ingest.turn("a", 0) is None


def test_a_replica_that_went_on_to_a_newer_version_does_not_hold_up_the_older(ingest: Calibrating) -> None:
    ingest.turn("a", 0)
    ingest.commit(1)
    ingest.loading.remove(("a", 0))
    assert ingest.turn("a", 1) == ingest.turn("b", 0) == FIRST_TURN


def test_two_versions_are_measured_side_by_side_each_by_one(ingest: Calibrating) -> None:
    ingest.commit(1)
    assert ingest.turn("a", 0) == ingest.turn("b", 1) == FIRST_TURN
    assert ingest.turn("c", 0) is None and ingest.turn("c", 1) is None


def test_once_settled_all_load_the_same_scales_and_nobody_measures(ingest: Calibrating) -> None:
    ingest.turn("a", 0)
    settled = ingest.settle(0, ONE)
    assert (settled.error, settled.scales, settled.replica_id, settled.tokens) == (None, SCALES, "a", 64)
    for replica in "abc":
        assert ingest.turn(replica, 0) == CalibrationLease(scales=SCALES, measures=False)


def test_the_next_version_is_loaded_with_the_scales_of_before_until_it_is_measured(ingest: Calibrating) -> None:
    ingest.settle(0, ONE)
    ingest.commit(1)
    assert ingest.turn("b", 1) == CalibrationLease(scales=SCALES, measures=True)


# --- settling


def test_of_two_measurements_of_a_version_the_first_holds(ingest: Calibrating) -> None:
    first = ingest.settle(0, ONE, replica_id="a")
    assert ingest.settle(0, TWO, replica_id="b") == first
    assert ingest.turn("b", 0) == CalibrationLease(scales=SCALES, measures=False)
    assert ingest.rule.newest == SCALES


def test_whoever_measured_settles_even_if_it_was_taken_for_dead_meanwhile(ingest: Calibrating) -> None:
    ingest.turn("a", 0)
    ingest.loading.clear()
    ingest.turn("b", 0)
    assert ingest.settle(0, ONE, replica_id="a").replica_id == "a"
    assert ingest.settle(0, TWO, replica_id="b").scales == SCALES


def test_a_version_that_was_dropped_meanwhile_is_not_found(ingest: Calibrating) -> None:
    ingest.commit(1)
    ingest.log.drop(0)
    with pytest.raises(NotFound, match="version 0 is not in the log any more"):
        ingest.settle(0, ONE)
    assert ingest.rule.newest is None and not ingest.log.folder(0).exists()


def test_an_older_version_that_settles_late_changes_nothing_for_those_that_follow(ingest: Calibrating) -> None:
    ingest.commit(1)
    ingest.settle(1, ONE)
    late = ingest.settle(0, TWO)
    assert late.scales != SCALES and ingest.turn("b", 0) == CalibrationLease(scales=late.scales, measures=False)
    ingest.commit(2)
    assert ingest.turn("b", 2) == CalibrationLease(scales=SCALES, measures=True)


def test_an_older_version_that_settles_late_does_not_take_the_place_of_a_trainers_scales(ingest: Calibrating) -> None:
    ingest.commit(1, scales=SCALES)
    ingest.settle(0, TWO)
    assert ingest.rule.newest == SCALES


def test_a_version_that_settles_while_a_newer_one_awaits_its_scales_leaves_that_one_awaiting(
    ingest: Calibrating,
) -> None:
    ingest.commit(1)
    ingest.settle(0, ONE)
    assert ingest.turn("b", 1) == CalibrationLease(scales=SCALES, measures=True)


# --- an ingest that starts again


def test_an_ingest_that_starts_again_knows_what_was_settled(ingest: Calibrating, start: Restart) -> None:
    settled = ingest.settle(0, ONE)
    again = start()
    assert again.turn("b", 0) == CalibrationLease(scales=SCALES, measures=False)
    assert again.rule.newest == SCALES and again.rule.largest == settled.largest == ingest.rule.largest
    assert again.settle(0, TWO) == settled


@pytest.mark.parametrize("crashed", [False, True], ids=["ended", "crashed before it was noted for the log"])
def test_an_ingest_that_starts_again_goes_on_from_the_version_that_was_settled(start: Restart, crashed: bool) -> None:
    ingest = start()
    ingest.measure(0, ONE)
    if crashed:
        (ingest.log.root / SETTLED_FILE).unlink()
    again = start(progressive=True)
    assert again.rule.newest == SCALES and again.measure(1, TWO).scales == SCALES


def test_an_ingest_that_starts_again_gives_the_turn_to_whoever_asks_first(ingest: Calibrating, start: Restart) -> None:
    ingest.turn("a", 0)
    again = start()
    assert again.turn("b", 0) == FIRST_TURN and again.turn("a", 0) is None


def test_the_largest_values_outlive_the_version_that_they_came_with(start: Restart) -> None:
    ingest = start(progressive=True)
    ingest.measure(0, ONE)
    ingest.commit(1, scales=SCALES)
    ingest.log.drop(0)
    assert start(progressive=True).measure(2, TWO).scales == SCALES


def test_the_largest_values_outlive_a_measurement_that_failed(start: Restart) -> None:
    ingest = start(progressive=True)
    ingest.measure(0, ONE)
    assert ingest.measure(1, measured((0, 0, 0))).error is not None
    assert start(progressive=True).measure(2, TWO).scales == SCALES


def test_the_scales_of_before_are_known_to_an_ingest_that_starts_while_the_newest_version_awaits_its_own(
    ingest: Calibrating, start: Restart
) -> None:
    ingest.settle(0, ONE)
    ingest.commit(1)
    again = start()
    assert again.turn("b", 1) == CalibrationLease(scales=SCALES, measures=True)
    assert again.settle(1, measured((0, 0, 0))).scales == SCALES


@pytest.mark.parametrize("where", ["0", "."], ids=["of the version", "of the log"])
@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_an_ingest_does_not_start_on_settled_scales_that_are_damaged_and_names_the_file(
    ingest: Calibrating, start: Restart, where: str, damage: str
) -> None:
    ingest.settle(0, ONE)
    path = ingest.log.root / where / SETTLED_FILE
    sound = path.read_text()
    path.write_text({"torn": sound[:-20], "flipped": sound.replace("2.0", "3.0"), "empty": ""}[damage])
    assert path.read_text() != sound
    with pytest.raises(LogCorrupt, match=f"{path} does not hash"):
        start()
    path.write_text(sound)
    assert start().rule.newest == SCALES


def test_a_replica_that_asks_for_a_version_with_damaged_scales_is_told_the_file(
    ingest: Calibrating, start: Restart
) -> None:
    ingest.settle(0, ONE)
    ingest.commit(1)
    path = ingest.log.folder(0) / SETTLED_FILE
    path.write_text(path.read_text()[:100])
    with pytest.raises(LogCorrupt, match=f"{path} does not hash"):
        start().turn("b", 0)
