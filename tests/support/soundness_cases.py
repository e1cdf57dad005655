"""Numbers that may be and that may not, for the kernel of ``quant/soundness.py`` on a GPU and in the interpreter."""

from typing import NamedTuple

import torch

from rollout_service.quant.soundness import CODES, FINITE_SCALES, FINITE_WEIGHTS, Allowed, Numbers, are_allowed, scales
from rollout_service.quant.soundness import table_of as _table_of

LARGEST = 7.5e35
_NAN, _INF = float("nan"), float("inf")
_TINY = torch.finfo(torch.float32).tiny


class Case(NamedTuple):
    """Numbers of one kind."""

    allowed: Allowed
    dtype: torch.dtype
    sound: tuple[float, ...]
    unsound: tuple[float, ...]


_BF16 = torch.finfo(torch.bfloat16).max
CASES = {
    "bfloat16": Case(FINITE_WEIGHTS["bfloat16"], torch.bfloat16, (0.0, -1.0, _BF16, -_BF16), (_INF, -_INF, _NAN)),
    "float16": Case(FINITE_WEIGHTS["float16"], torch.float16, (65504.0, -65504.0), (_INF, -_INF, _NAN)),
    "float32": Case(FINITE_WEIGHTS["float32"], torch.float32, (_BF16, -_BF16), (3.4e38, -3.4e38, _INF, _NAN)),
    "e4m3": Case(CODES["float8_e4m3fn"], torch.float8_e4m3fn, (448.0, -448.0, 0.0), (_NAN, -_NAN)),
    "int8": Case(CODES["int8"], torch.int8, (127, -127, 0), (-128,)),
    "scales": Case(
        scales(LARGEST, power_of_two=False), torch.float32, (_TINY, 0.3, LARGEST), (0.0, -1.0, 1e-39, 8e35, _INF, _NAN)
    ),
    "powers of two": Case(
        scales(LARGEST, power_of_two=True), torch.float32, (_TINY, 0.25, 2.0**100), (0.3, 0.75, 0.0, -0.5, _INF, _NAN)
    ),
    "made scales": Case(FINITE_SCALES, torch.float32, (0.3, LARGEST), (_INF, _NAN)),
}


def found_of(case: Case, bad: float | None, elements: int, start: int, where: int, device: torch.device) -> bool:
    """What the kernel finds of ``elements`` numbers, of which that at ``where`` is ``bad``, among sound ones of other
    kinds. They begin ``start`` bytes behind an address that is aligned; what lies around them may not be."""
    numbers = torch.tensor([case.sound[i % len(case.sound)] for i in range(elements)]).to(case.dtype)
    if bad is not None:
        numbers[where] = torch.tensor(bad).to(case.dtype)
    around = torch.full((start + numbers.nbytes + 64,), 0xFF, dtype=torch.uint8)
    around[start : start + numbers.nbytes] = numbers.view(torch.uint8)
    held = [around.to(device)]
    table = [Numbers(held[0].data_ptr() + start, elements, case.allowed)]
    for other in CASES.values():
        held.append(torch.tensor(other.sound).to(other.dtype).to(device))
        table.append(Numbers(held[-1].data_ptr(), len(other.sound), other.allowed))
    return bool(are_allowed(_table_of(table), device))
