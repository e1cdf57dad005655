"""Streaming statistics of the mismatch: sums in fp64 and a quantile sketch, both mergeable."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from datasketches import req_floats_sketch

from rollout_service.correction.ratios import bounded, chi2, k3, mult_prob_error
from rollout_service.protocol.mismatch import KVAgeRow, MismatchRow

QUANTILES = (0.5, 0.9, 0.99, 0.999)
SKETCH_K = 12
"""Sketch size for relative-error quantiles, accurate at the upper end: within a few percent of ``1 − rank``; 11 KB
after 10⁷ tokens."""
JUDGED_AT_MOST = 10.0
"""The largest factor of one token in ``Sums.judged_error``."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over tokens, with ``lr = trainer − rollout`` clamped to ±20 and ``ρ = exp(lr)``; ``+`` merges two.

    Formulas and clamps are those of ``rollout_service.correction``.
    """

    tokens: int = 0
    sequences: int = 0
    """Number of sequences whose counted tokens all came from one version; only these are in ``chi2_seq``."""
    k1: float = 0.0
    k3: float = 0.0
    chi2_token: float = 0.0
    chi2_seq: float = 0.0
    """Sum over sequences."""
    weight: float = 0.0
    """Sum of min(ρ, C)."""
    squared_weight: float = 0.0
    prob_error: float = 0.0
    judged_error: float = 0.0
    """``prob_error`` with at most ``JUDGED_AT_MOST`` for a token, so that one outlier makes no version suspect."""
    outside: int = 0
    """Number of tokens with ρ outside [1/C, C]."""
    abs_diff_max: float = 0.0
    """The largest \\|lr\\|, not clamped."""

    @classmethod
    def of(cls, log_ratio: torch.Tensor, sequence_sums: torch.Tensor, ratio_bound: float) -> "Sums":
        """Compute the sums from tokens [tokens] and from ``Σ lr`` of whole sequences [sequences], both fp64; C is
        ``ratio_bound``."""
        ratio = bounded(log_ratio).exp()
        weight = ratio.clamp(max=ratio_bound)
        error = mult_prob_error(log_ratio)
        return cls(
            tokens=log_ratio.numel(),
            sequences=sequence_sums.numel(),
            k1=-log_ratio.sum().item(),
            k3=k3(log_ratio).sum().item(),
            chi2_token=chi2(log_ratio).sum().item(),
            chi2_seq=chi2(sequence_sums).sum().item(),
            weight=weight.sum().item(),
            squared_weight=weight.square().sum().item(),
            prob_error=error.sum().item(),
            judged_error=error.clamp(max=JUDGED_AT_MOST).sum().item(),
            outside=int(((ratio > ratio_bound) | (ratio < 1.0 / ratio_bound)).sum()),
            abs_diff_max=log_ratio.abs().max().item() if log_ratio.numel() else 0.0,
        )

    def __add__(self, other: "Sums") -> "Sums":
        joined = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Sums(**{**joined, "abs_diff_max": max(self.abs_diff_max, other.abs_diff_max)})

    @property
    def mean_k3(self) -> float:
        """Return the mean k3 in nats per token."""
        return self.k3 / self.tokens

    @property
    def mean_prob_error(self) -> float:
        """Return NeMo-RL's ``token_mult_prob_error``, ≥ 1."""
        return self.prob_error / self.tokens

    @property
    def mean_judged_error(self) -> float:
        """Return ``mean_prob_error`` without what single outliers add."""
        return self.judged_error / self.tokens


class Statistics:
    """Statistics of the tokens that one replica sampled with one version, or of several of these merged."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.by_age: dict[int, Sums] = {}
        """Sums of the same tokens, without sequences, by the age of their keys and values."""
        self._abs_diff = req_floats_sketch(SKETCH_K, True)

    @classmethod
    def of(
        cls,
        log_ratio: torch.Tensor,
        sequence_sums: torch.Tensor,
        ratio_bound: float,
        by_age: Mapping[int, torch.Tensor] | None = None,
    ) -> "Statistics":
        """Compute statistics; arguments as for ``Sums.of``.

        ``by_age``: the tokens of ``log_ratio`` by the age of their keys and values. None: all have age 0.
        """
        made, no_sequences = cls(), sequence_sums[:0]
        made.sums = Sums.of(log_ratio, sequence_sums, ratio_bound)
        ages = {0: log_ratio} if by_age is None else by_age
        made.by_age = {age: Sums.of(tokens, no_sequences, ratio_bound) for age, tokens in ages.items()}
        made._abs_diff.update(log_ratio.abs().float().numpy())
        return made

    def merge(self, other: "Statistics") -> None:
        """Add the observations of ``other``."""
        self.sums = self.sums + other.sums
        for age, sums in other.by_age.items():
            self.by_age[age] = self.by_age.get(age, Sums()) + sums
        self._abs_diff.merge(other._abs_diff)

    def row(
        self,
        version: int,
        replica_id: str | None,
        suspect_since: float | None = None,
        adapter: str | None = None,
        adapter_version: int | None = None,
    ) -> MismatchRow:
        """Return the displayed row. At least one token is required."""
        sums = self.sums
        return MismatchRow(
            version=version,
            replica_id=replica_id,
            adapter=adapter,
            adapter_version=adapter_version,
            tokens=sums.tokens,
            sequences=sums.sequences,
            k1=sums.k1 / sums.tokens,
            k3=sums.mean_k3,
            chi2_token=sums.chi2_token / sums.tokens,
            chi2_seq=sums.chi2_seq / sums.sequences if sums.sequences else None,
            ess_ratio=sums.weight**2 / (sums.squared_weight * sums.tokens),
            prob_error=sums.mean_prob_error,
            abs_diff_max=sums.abs_diff_max,
            outside_ratio=sums.outside / sums.tokens,
            quantiles=dict(zip(QUANTILES, self._abs_diff.get_quantiles(QUANTILES, inclusive=True), strict=True)),
            kv_ages=tuple(
                KVAgeRow(age=age, tokens=of_age.tokens, k3=of_age.mean_k3, prob_error=of_age.mean_prob_error)
                for age, of_age in sorted(self.by_age.items())
                if of_age.tokens
            ),
            suspect_since=suspect_since,
        )
