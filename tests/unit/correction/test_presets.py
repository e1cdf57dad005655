"""The published recipes, on ratios chosen to fall on either side of their bounds; the page that lists them."""

import math
import re
from pathlib import Path

import pytest
import torch

from rollout_service.correction import PRESETS, Correction, ImportanceWeights, Rejection, Veto, correct, preset
from tests.unit.correction.batches import padded, unpadded
from tests.unit.correction.expected import Rows

PAGE = (Path(__file__).parents[3] / "docs" / "correction.md").read_text()


def of_ratios(*ratios: list[float]) -> Rows:
    """Sequences of tokens with these ratios π_trainer / π_rollout."""
    return [[(math.log(ratio) - 10.0, -10.0) for ratio in row] for row in ratios]


TOKENS = [[0.4, 1.0, 1.9, 3.0, 6.0]]
HOPELESS = [[1.0, 9e-5], [1.0, 2e-4]]

CASES = {
    "metrics_only": (TOKENS, [[1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1]]),
    "token_tis": (TOKENS, [[0.4, 1, 1.9, 2, 2]], [[1, 1, 1, 1, 1]]),
    "seq_tis": ([[0.4, 1.5], [1.5, 1.6]], [[0.6, 0.6], [2, 2]], [[1, 1], [1, 1]]),
    "icepop": ([[0.4, 0.6, 4.9, 5.1]], [[0, 0.6, 4.9, 0]], [[1, 1, 1, 1]]),
    "token_mis": ([*TOKENS, *HOPELESS], [[0, 1, 1.9, 0, 0], [0, 0], [1, 0]], [[0, 1, 1, 0, 0], [0, 0], [1, 0]]),
    "seq_mis": (
        [[0.9, 0.6], [0.9, 0.5], [1.5, 1.3], [1.5, 1.4]],
        [[0.54] * 2, [0] * 2, [1.95] * 2, [0] * 2],
        [[1, 1], [0, 0], [1, 1], [0, 0]],
    ),
    "seq_mask_tis": (
        [[1.5, 1.5**-1 * 1.0038], [1.5, 1.5**-1 * 1.0042], [0.9992], [0.9988]],
        [[1.5, 1.0038 / 1.5], [0, 0], [0.9992], [0]],
        [[1, 1], [0, 0], [1], [0]],
    ),
    "geo_rs": ([[2.0, 0.5], [1.0012], [0.9992], [0.9988]], [[1, 1], [0], [1], [0]], [[1, 1], [0], [1], [0]]),
    "geo_rs_token_tis": ([[3.0, 1 / 3], [1.0012]], [[2, 1 / 3], [0]], [[1, 1], [0]]),
    "geo_rs_seq_tis": ([[3.0, 1 / 3], [1.0012]], [[1, 1], [0]], [[1, 1], [0]]),
    "k3_rs": ([[1.1], [1.2], [1.2, 1.0]], [[1], [0], [1, 1]], [[1], [0], [1, 1]]),
    "k3_rs_token_tis": ([[1.1], [1.2], [1.2, 1.0]], [[1.1], [0], [1.2, 1]], [[1], [0], [1, 1]]),
    "k3_rs_seq_tis": ([[1.1, 0.9], [1.2, 1.2]], [[0.99, 0.99], [0, 0]], [[1, 1], [0, 0]]),
    "skyrl_token_tis": ([*HOPELESS, [3.0], [101.0]], [[0, 0], [1, 2e-4], [2], [0]], [[0, 0], [1, 1], [1], [0]]),
    "skyrl_seq_tis": ([[4.0, 1.1], [4.0, 2.0], [101.0]], [[4.4] * 2, [5, 5], [0]], [[1, 1], [1, 1], [0]]),
    "skyrl_geo_mask": ([[1.009], [1.0105], [0.991], [0.9895], [200.0, 0.005]], *[[[1], [0], [1], [0], [0, 0]]] * 2),
    "skyrl_product_mask": ([[3.0, 0.5], [3.0, 0.8], [0.6], [0.4], [200.0, 0.005]],
                           *[[[1, 1], [0, 0], [1], [0], [0, 0]]] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_weighs_and_keeps_what_its_recipe_says(name: str) -> None:
    ratios, weights, kept = CASES[name]
    rows = of_ratios(*ratios)
    found = correct(*padded(rows), preset(name))
    assert unpadded(found.weights, rows) == [pytest.approx(row) for row in weights]
    assert unpadded(found.mask, rows) == [[bool(value) for value in row] for row in kept]


def test_an_unknown_preset_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"'tis': there are metrics_only, token_tis, seq_tis"):
        preset("tis")


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["token_tis"] = Correction()  # type: ignore[index]
    with pytest.raises(AttributeError):
        preset("token_tis").veto = Veto()  # type: ignore[misc]


def test_the_page_lists_every_preset() -> None:
    assert first_column("Recipes") == list(PRESETS)


def test_the_page_lists_every_metric_and_no_other() -> None:
    recipe = Correction(
        ImportanceWeights(upper=2.0, lower=0.5, outside="mask", batch_normalize=True),
        (Rejection("seq_mean_k3", 1.0),),
        Veto(),
    )
    measured = correct([[-1.0]], [[-1.0]], correction=recipe).metrics
    written = [name.replace("…", "rollout_rs_{statistic}") for name in first_column("Metrics")]
    assert sorted(f"rollout_corr/{name.replace('{statistic}', 'seq_mean_k3')}" for name in written) == sorted(measured)


def test_the_pages_examples_run() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    logged: list[dict[str, float]] = []
    names = {
        "logprobs": logprobs,
        "rollout_logprobs": torch.tensor([[-1.5, -2.0]]),
        "mask": torch.ones(1, 2),
        "advantages": torch.ones(1, 1),
        "log": logged.append,
    }
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["loss"].item() == pytest.approx((math.exp(0.5) * 1 + 2) / 2)
    assert logged[0]["rollout_corr/kl"] == pytest.approx(-0.25)
    assert isinstance(names["mine"], Correction)


def first_column(heading: str) -> list[str]:
    """The code words in the first cells of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
