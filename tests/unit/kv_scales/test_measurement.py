"""Of what the ranks of an engine saw, the worst counts."""

import math
from itertools import permutations

import pytest

from rollout_service.kv_scales.fp8_error import LayerError
from rollout_service.kv_scales.measurement import KVMeasurement, saturates_nothing, worst_errors

FIELDS = tuple(LayerError.model_fields)


def rank(*errors: float, layer: str = "l.0") -> KVMeasurement:
    """With one error for each field."""
    return KVMeasurement(
        amax={layer: ((1.0, 1.0, 1.0),)},
        errors={layer: LayerError(**dict(zip(FIELDS, errors, strict=True)))},
        tokens=1,
    )


def test_each_error_is_that_of_the_rank_where_it_is_largest() -> None:
    rising, falling = rank(*range(7)), rank(*reversed(range(7)))
    [(layer, worst)] = worst_errors([rising, falling]).items()
    assert layer == "l.0" and [getattr(worst, name) for name in FIELDS] == [6, 5, 4, 3, 4, 5, 6]
    assert worst_errors([rising]) == rising.errors


@pytest.mark.parametrize("order", list(permutations([0.1, math.nan, 0.2])), ids=str)
def test_an_error_that_is_no_number_on_one_rank_is_not_passed_over(order: tuple[float, ...]) -> None:
    worst = worst_errors([rank(error, *[0.0] * 6) for error in order])["l.0"]
    assert math.isnan(worst.k_saturated) and worst.v_saturated == 0


def test_a_measurement_survives_the_way_out_of_a_worker() -> None:
    measured = rank(math.nan, math.inf, *[0.5] * 5)
    again = KVMeasurement.model_validate(measured.model_dump(mode="json"))
    assert repr(again) == repr(measured)


@pytest.mark.parametrize(
    ("amax", "scale", "nothing"), [((1e9, 448, 448), 1.0, True), ((0, 449, 0), 1.0, False), ((0, 0, 900), 2.0, False)]
)
def test_saturation_is_of_k_and_v_of_any_rank_and_pass_beyond_448_times_the_scale(
    amax: tuple[float, float, float], scale: float, nothing: bool
) -> None:
    fits = rank(*[0.0] * 7)
    seen = fits.model_copy(update={"amax": {"l.0": ((1.0, 1.0, 1.0), amax)}})
    scales = {"l.0.k_scale": scale, "l.0.v_scale": scale}
    assert saturates_nothing([fits, seen], scales) == nothing
    assert saturates_nothing([fits], None)
