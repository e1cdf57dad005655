"""The published recipes, on ratios chosen to fall on either side of their bounds; the page that lists them."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_service.correction import PRESETS, Correction, ImportanceWeights, Rejection, Veto, correct, preset
from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling_mask import pack
from tests.unit.correction.batches import padded, unpadded
from tests.unit.correction.expected import Rows
from tests.unit.correction.test_published import FORMULAS

PAGE = (Path(__file__).parents[3] / "docs" / "correction.md").read_text()


def of_ratios(*ratios: list[float]) -> Rows:
    """Sequences of tokens with these ratios π_trainer / π_rollout."""
    return [[(math.log(ratio) - 10.0, -10.0) for ratio in row] for row in ratios]


TOKENS = [[0.4, 1.0, 1.9, 3.0, 6.0]]
HOPELESS = [[1.0, 9e-5], [1.0, 2e-4]]

SLIME_MEAN = (0.4 + 1.0 + 1.9 + 2.0) / 4
CASES = {
    "metrics_only": (TOKENS, [[1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1]]),
    "token_tis": (TOKENS, [[0.4, 1, 1.9, 2, 2]], [[1, 1, 1, 1, 1]]),
    "seq_tis": ([[0.4, 1.5], [1.5, 1.6]], [[0.6, 0.6], [2, 2]], [[1, 1], [1, 1]]),
    "icepop": ([[0.4, 0.6, 4.9, 5.1]], [[0, 0.6, 4.9, 0]], [[1, 1, 1, 1]]),
    "trl_sequence_mask": ([[2.0, 1.4], [2.0, 1.6], [0.01]], [[2.8, 2.8], [0, 0], [0.01]], [[1, 1], [1, 1], [1]]),
    "token_mis": ([*TOKENS, *HOPELESS], [[0, 1, 1.9, 0, 0], [0, 0], [1, 0]], [[0, 1, 1, 0, 0], [0, 0], [1, 0]]),
    # the mean of the truncated weights over all sampled tokens, rejected ones included
    "slime_mis": ([[0.4, 1.0, 1.9, 3.0]], [[0, 1 / SLIME_MEAN, 1.9 / SLIME_MEAN, 0]], [[0, 1, 1, 0]]),
    "seq_mis": (
        [[0.9, 0.6], [0.9, 0.5], [1.5, 1.3], [1.5, 1.4]],
        [[0.54] * 2, [0] * 2, [1.95] * 2, [0] * 2],
        [[1, 1], [0, 0], [1, 1], [0, 0]],
    ),
    "seq_mis_upper": ([[1.5, 1.3], [1.5, 1.4], [0.01]], [[1.95] * 2, [0, 0], [0.01]], [[1, 1], [1, 1], [1]]),
    "seq_mask_tis": (
        [[1.5, 1.5**-1 * 1.0038], [1.5, 1.5**-1 * 1.0042], [0.9992], [0.9988]],
        [[1.5, 1.0038 / 1.5], [0, 0], [0.9992], [0]],
        [[1, 1], [0, 0], [1], [0]],
    ),
    "nemo_seq_error_mask": ([[2.9, 1.0], [3.1, 1.0], [1 / 2.9, 1.0], [1 / 3.1, 1.0], [1.9]],
                            *[[[1, 1], [0, 0], [1, 1], [0, 0], [1]]] * 2),
    "prime_ipo": (TOKENS, TOKENS, [[1, 1, 1, 1, 1]]),  # probabilities of e^-10 differ by nothing: see below
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


def test_prime_ipo_looks_at_probabilities_and_not_at_their_ratio():
    rows = [[(math.log(trainer), math.log(rollout)) for trainer, rollout in ((0.9, 0.59), (0.9, 0.61), (0.3, 0.61))]]
    found = correct(*padded(rows), preset("prime_ipo"))
    assert found.mask.tolist() == [[False, True, False]]
    assert found.weights[0].tolist() == pytest.approx([0, 0.9 / 0.61, 0])


SOURCES = {
    "sampled": ["token_mis", "slime_mis", "seq_mask_tis", "prime_ipo", "skyrl_token_tis", "skyrl_seq_tis",
                "skyrl_geo_mask", "skyrl_product_mask", "skyrl_token_mask", "kpop", "flash_reinforce", "dppo_tv",
                "dppo_kl", "tvpo", "opsm"],
    "kept": ["seq_mis", "nemo_seq_error_mask", "geo_rs", "geo_rs_token_tis", "geo_rs_seq_tis", "k3_rs",
             "k3_rs_token_tis", "k3_rs_seq_tis", "geo_rs_token_mis", "trust_region_mask", "m2po"],
}  # fmt: skip
"""By what each project divides; the recipes that are not here reject nothing."""


def test_every_recipe_that_rejects_divides_as_its_source_does():
    rejecting = {name: recipe for name, recipe in PRESETS.items() if recipe.rejections or recipe.veto}
    assert {name: recipe.divides_by for name, recipe in rejecting.items()} == {
        name: divides_by for divides_by, names in SOURCES.items() for name in names
    }


def test_every_preset_is_compared_with_its_source():
    assert [*CASES, *FORMULAS] == list(PRESETS)


@pytest.mark.parametrize("name", CASES)
def test_a_preset_weighs_and_keeps_what_its_recipe_says(name):
    ratios, weights, kept = CASES[name]
    rows = of_ratios(*ratios)
    found = correct(*padded(rows), preset(name))
    assert unpadded(found.weights, rows) == [pytest.approx(row) for row in weights]
    assert unpadded(found.mask, rows) == [[bool(value) for value in row] for row in kept]


def test_an_unknown_preset_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"'tis': choose one of metrics_only, token_tis, seq_tis"):
        preset("tis")


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["token_tis"] = Correction()
    with pytest.raises(AttributeError):
        preset("token_tis").veto = Veto()


def test_the_page_lists_every_preset():
    assert first_column("Recipes") == list(PRESETS)


def test_the_page_lists_every_metric_and_no_other():
    recipe = Correction(
        ImportanceWeights(upper=2.0, lower=0.5, outside="mask", batch_normalize=True),
        (Rejection("seq_mean_k3", 1.0),),
        Veto(),
    )
    measured = correct([[-1.0]], [[-1.0]], correction=recipe, missing_logprobs="mask").metrics
    written = [name.replace("…", "rollout_rs_{statistic}") for name in first_column("Metrics")]
    assert sorted(f"rollout_corr/{name.replace('{statistic}', 'seq_mean_k3')}" for name in written) == sorted(measured)


def test_the_pages_examples_run():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    logged: list[dict[str, float]] = []
    reported: list[Any] = []
    completion = Completion(
        index=0,
        token_ids=(3, 5),
        logprobs=(-0.7, -1.1),
        finish_reason="length",
        spans=(Span(version=4, start=0, end=1), Span(version=5, start=1, end=2)),
        packed_sampling_mask=(pack([[2, 3], [5, 6, 7]]),),
    )
    rollout = Rollout(request_id="r", prompt_token_ids=(1,), completions=(completion,), replica_id="r1")
    names: dict[str, Any] = {
        "logprobs": logprobs,
        "rollout_logprobs": torch.tensor([[-1.5, -2.0]]),
        "mask": torch.ones(1, 2),
        "advantages": torch.ones(1, 1),
        "log": logged.append,
        # of "Truncated sampling" and "Stale tokens"
        "rollouts": [rollout],
        "sampled": torch.tensor([[3, 5]]),
        "logits": torch.zeros(1, 2, 8),
        "temperature": 1.0,
        "client": SimpleNamespace(report_mismatch=lambda *args, **options: reported.append((*args, options))),
    }
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["loss"].item() == pytest.approx((math.exp(0.5) * 1 + 2) / 2)
    assert logged[0]["rollout_corr/kl"] == pytest.approx(-0.25)
    assert isinstance(names["mine"], Correction)
    [(of, logprobs, options)] = reported
    assert (of, options) == ([rollout], {"renormalized": True})
    assert logprobs.tolist() == [pytest.approx([-math.log(2), -math.log(3)])]
    assert names["lag"].tolist() == [[3, 2]] and names["fresh"].tolist() == [[False, False]]


def first_column(heading: str) -> list[str]:
    """The code words in the first cells of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|`")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
