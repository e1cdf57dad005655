"""Published recipes by name, with their projects' bounds and denominators. docs/correction.md lists the sources."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from rollout_service.correction.recipe import Correction
from rollout_service.correction.rejection import Rejection, Statistic, Veto
from rollout_service.correction.weights import GammaWeights, ImportanceWeights

_TOKEN_TIS = ImportanceWeights(level="token", upper=2.0)
_SEQ_TIS = ImportanceWeights(level="sequence", upper=2.0)
_UNBOUNDED = ImportanceWeights(level="token", upper=math.inf)
_GEO_RS = Rejection("seq_mean_k1", lower=0.999, upper=1.001)
_K3_RS = Rejection("seq_mean_k3", upper=0.01)
_SKYRL_OUTLIERS = Veto(lower=1e-4, upper=100.0)
"""Suggested by SkyRL's documentation; off by default there."""
_DPPO_TIS = ImportanceWeights(level="token", upper=20.0)


def _trainer_over_rollout(statistic: Statistic, lower: float, upper: float) -> Rejection:
    """Return a rejection with bounds of π_trainer / π_rollout; those of k1 are of its inverse."""
    return Rejection(statistic, lower=1.0 / upper, upper=1.0 / lower)


PRESETS: Mapping[str, Correction] = MappingProxyType(
    {
        "metrics_only": Correction(),
        "token_tis": Correction(_TOKEN_TIS),
        "seq_tis": Correction(_SEQ_TIS),
        "icepop": Correction(ImportanceWeights(level="token", lower=0.5, upper=5.0, outside="mask")),
        "trl_sequence_mask": Correction(ImportanceWeights(level="sequence", upper=3.0, outside="mask")),
        "token_mis": Correction(
            _UNBOUNDED, (Rejection("token_k1", lower=0.5, upper=2.0),), Veto(lower=1e-4), divides_by="sampled"
        ),
        "slime_mis": Correction(
            ImportanceWeights(level="token", upper=2.0, batch_normalize=True),
            (Rejection("token_k1", lower=0.5, upper=2.0),),
            Veto(lower=1e-4),
            divides_by="sampled",
        ),
        "seq_mis": Correction(_SEQ_TIS, (Rejection("seq_sum_k1", lower=0.5, upper=2.0),)),
        "seq_mis_upper": Correction(ImportanceWeights(level="sequence", upper=2.0, outside="mask")),
        "seq_mask_tis": Correction(
            _UNBOUNDED,
            (_trainer_over_rollout("seq_mean_k1", 0.999, 1.002),),
            divides_by="sampled",
        ),
        "nemo_seq_error_mask": Correction(rejections=(Rejection("seq_mean_prob_error", upper=2.0),)),
        "prime_ipo": Correction(_UNBOUNDED, (Rejection("token_prob_diff", upper=0.3),), divides_by="sampled"),
        "geo_rs": Correction(rejections=(_GEO_RS,)),
        "geo_rs_token_tis": Correction(_TOKEN_TIS, (_GEO_RS,)),
        "geo_rs_seq_tis": Correction(_SEQ_TIS, (_GEO_RS,)),
        "k3_rs": Correction(rejections=(_K3_RS,)),
        "k3_rs_token_tis": Correction(_TOKEN_TIS, (_K3_RS,)),
        "k3_rs_seq_tis": Correction(_SEQ_TIS, (_K3_RS,)),
        "skyrl_token_tis": Correction(_TOKEN_TIS, veto=_SKYRL_OUTLIERS, divides_by="sampled"),
        "skyrl_seq_tis": Correction(
            ImportanceWeights(level="sequence", upper=5.0), veto=_SKYRL_OUTLIERS, divides_by="sampled"
        ),
        "skyrl_geo_mask": Correction(
            rejections=(_trainer_over_rollout("seq_mean_k1", 0.99, 1.01),),
            veto=_SKYRL_OUTLIERS,
            divides_by="sampled",
        ),
        "skyrl_product_mask": Correction(
            rejections=(_trainer_over_rollout("seq_sum_k1", 0.5, 2.0),),
            veto=_SKYRL_OUTLIERS,
            divides_by="sampled",
        ),
        "skyrl_token_mask": Correction(
            rejections=(Rejection("token_k1", lower=0.5, upper=2.0),),
            divides_by="sampled",
        ),
        "geo_rs_token_mis": Correction(_UNBOUNDED, (_GEO_RS, Rejection("token_k1", lower=0.5, upper=2.0))),
        "trust_region_mask": Correction(rejections=(Rejection("seq_max_k2", upper=2.5), _K3_RS)),
        "areal_behave_cap": Correction(ImportanceWeights(level="token", upper=5.0, outside="mask")),
        "areal_geo_mask": Correction(ImportanceWeights(level="geometric", upper=5.0, outside="mask")),
        "kpop": Correction(_UNBOUNDED, (Rejection("token_binary_kl_both", upper=0.1),), divides_by="sampled"),
        "flash_reinforce": Correction(_UNBOUNDED, (Rejection("seq_mean_binary_kl", upper=5e-3),), divides_by="sampled"),
        "m2po": Correction(_UNBOUNDED, (Rejection("token_m2", upper=0.04),)),
        "dppo_tv": Correction(
            _DPPO_TIS, (Rejection("token_prob_diff", upper=0.15, only_if="diverging"),), divides_by="sampled"
        ),
        "dppo_kl": Correction(
            _DPPO_TIS, (Rejection("token_binary_kl", upper=0.05, only_if="diverging"),), divides_by="sampled"
        ),
        "tvpo": Correction(
            _TOKEN_TIS, (Rejection("seq_mean_ratio_diff", upper=2.0, only_if="diverging"),), divides_by="sampled"
        ),
        "opsm": Correction(
            # the lower bound is below every clamped mean: only one side is bounded
            rejections=(Rejection("seq_mean_k1", lower=1e-9, upper=math.exp(1e-4), only_if="negative"),),
            divides_by="sampled",
        ),
        "vespo": Correction(GammaWeights()),
    }
)
"""To use other bounds, call ``dataclasses.replace``, or create a ``Correction``."""


def preset(name: str) -> Correction:
    """Return the recipe of that name. Raises ValueError, with the known names, for any other."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
