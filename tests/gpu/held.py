"""What an engine on a GPU holds of a version."""

import re

import torch

from rollout_service.quant.formats import FP8_BLOCK, WeightFormat
from tests.support.engine_layout import engine_digests, quantize
from tests.support.one_engine import OneEngine
from tests.support.probe import DECODED


async def require_held(
    one: OneEngine, weights: dict[str, torch.Tensor], form: WeightFormat = FP8_BLOCK
) -> dict[str, str]:
    """Require the engine's parameters to be what quantizing ``weights`` gives. Return the engine's digests."""
    held, expected = await one.digests(), engine_digests(quantize(weights, form=form))
    unlike = {name for name in expected if not name.endswith(DECODED) and held.get(name) != expected[name]}
    assert unlike == set(), re.sub(r"layers\.\d+", "layers.*", str(sorted(unlike)))
    return held
