"""What becomes FP8 of each family of ``tests/support/families.py``, as vLLM's own classes say; no engine is started."""

import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common.results import Json
from rollout_service.config import QuantConfig
from rollout_service.engine.layout_reader import read_layout
from rollout_service.model.quant_plan import plan
from rollout_service.model.served_model import ServedModel
from tests.support import families

KEEP = QuantConfig(indivisible="keep_bf16")


def readings(of: Iterable[str]) -> Iterator[Json]:
    """One for each family. Imports vllm, and is one rank of a distributed group for each in turn."""
    for family in of:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / family
            families.config_of(family).save_pretrained(folder)
            yield {"family": family, **_reading(folder)}


def _reading(folder: Path) -> Json:
    model = ServedModel.load(folder)
    try:
        layout = read_layout(folder)
    except ValueError as refusal:
        return {"refusal": str(refusal).partition(f"{folder.name}: ")[2], "source": None, "fp8": None, "kept": []}
    decided = plan(layout.linears(model.shapes), KEEP, 1, model.heads, layout=layout)
    outside = {model.head, model.embedding}
    sizes = {n: math.prod(s) for n, s in model.shapes.items() if len(s) > 1 and n not in outside}
    share = sum(sizes[name] for name in decided.quantized) / sum(sizes.values())
    kept = sorted(set(decided.kept.values()) - {"router"})
    return {"refusal": None, "source": layout.source, "fp8": share, "kept": kept}
