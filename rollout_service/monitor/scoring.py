"""Convert a report's numbers to log-ratios per version, replica and adapter; errors name the invalid number."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from rollout_service.errors import InvalidRequest
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Key
from rollout_service.protocol.mismatch import MismatchReport, ReportedCompletion, ReportedRollout
from rollout_service.protocol.rollout import Span
from rollout_service.web.errors import validation_error

Doubles: TypeAlias = NDArray[np.float64]
_Span: TypeAlias = tuple[Key, int, int, int]
"""Version, replica and adapter, first token, the token after the last, and the age of its keys and values."""
MAX_AGE = 64
"""Highest age of keys and values that is counted on its own, in versions; older ones are counted with it."""
POSITIVE_BY_ROUNDING = 1e-3
"""Maximum logprob. A larger number is a loss, a logit, or a negated logprob."""
LARGEST = float(np.finfo(np.float32).max) / 4  # so that a difference is finite in fp32, too


def parse_report(body: bytes) -> MismatchReport:
    """Parse the report in a request's body. Raises InvalidRequest, or MalformedRequest for invalid JSON."""
    try:
        return MismatchReport.model_validate_json(body)
    except ValidationError as error:
        raise validation_error("POST /v1/mismatch", error.errors(include_url=False)) from None


@dataclass(frozen=True)
class Scored:
    """Statistics of a report, by version, replica and adapter."""

    statistics: dict[Key, Statistics]
    truncated: dict[Key, int]
    """Number of tokens of truncated rollouts, which are in no statistic: their ratios contain the kept mass."""


def score(report: MismatchReport, ratio_bound: float) -> Scored:
    """Compute statistics of each version, replica and adapter in the report. Raises InvalidRequest at the first invalid
    number."""
    groups: dict[Key, _Group] = defaultdict(_Group)
    apart: dict[Key, _Group] = defaultdict(_Group)
    for i, rollout in enumerate(report.rollouts):
        into = apart if rollout.truncated_sampling and not rollout.renormalized else groups
        for j, completion in enumerate(rollout.completions):
            where = f"rollouts[{i}].completions[{j}]"
            spans = list(_spans(where, rollout, completion))
            _collect(into, spans, *_log_ratio(where, completion))
    statistics = {
        key: Statistics.of(
            torch.from_numpy(np.concatenate(group.tokens)),
            torch.tensor(group.sums, dtype=torch.float64),
            ratio_bound,
            {age: torch.from_numpy(np.concatenate(tokens)) for age, tokens in group.by_age.items()},
        )
        for key, group in groups.items()
    }
    return Scored(statistics, {key: sum(map(len, group.tokens)) for key, group in apart.items()})


@dataclass
class _Group:
    tokens: list[Doubles] = field(default_factory=list)
    """Log-ratios."""
    by_age: dict[int, list[Doubles]] = field(default_factory=lambda: defaultdict(list))
    """The same by the age of their keys and values."""
    sums: list[float] = field(default_factory=list)
    """Sums of whole sequences."""


def _collect(groups: dict[Key, _Group], spans: list[_Span], log_ratio: Doubles, selected: NDArray[np.bool_]) -> None:
    """Assign each token to its key, and the sequence only if one key has all of it."""
    parts: dict[Key, list[Doubles]] = defaultdict(list)
    for key, start, end, age in spans:
        tokens = log_ratio[start:end][selected[start:end]]
        if len(tokens):
            parts[key].append(tokens)
            groups[key].by_age[age].append(tokens)
    for key, tokens_of in parts.items():
        groups[key].tokens += tokens_of
        if len(parts) == 1:
            groups[key].sums.append(float(sum(tokens.sum() for tokens in tokens_of)))


def _spans(where: str, rollout: ReportedRollout, completion: ReportedCompletion) -> Iterator[_Span]:
    _require_cover(where, completion.spans, len(completion.rollout_logprobs))
    for span in completion.spans:
        replica_id = span.replica_id or rollout.replica_id
        assert replica_id is not None, "the report would have been refused"
        key = Key(span.version, replica_id, span.adapter, span.adapter_version)
        yield key, span.start, span.end, min(max(0, span.version - span.oldest_kv), MAX_AGE)


def _require_cover(where: str, spans: tuple[Span, ...], num_tokens: int) -> None:
    position = 0
    for span in spans:
        if span.start != position:
            break
        position = span.end
    else:
        if position == num_tokens:
            return
    raise InvalidRequest(f"{where}.spans do not cover the {num_tokens} tokens one after the other: {spans}")


def _log_ratio(where: str, completion: ReportedCompletion) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return ``trainer − rollout`` [tokens], and the mask of counted tokens."""
    trainer = np.asarray(completion.trainer_logprobs, np.float64)
    sampled = np.asarray(completion.rollout_logprobs, np.float64)
    lengths = {"trainer_logprobs": len(trainer), "mask": len(sampled if completion.mask is None else completion.mask)}
    for name, length in lengths.items():
        if length != len(sampled):
            raise InvalidRequest(f"{where}.{name} has {length} entries, but {len(sampled)} tokens were sampled")
    selected = np.ones(len(sampled), bool) if completion.mask is None else np.asarray(completion.mask, bool)
    trainer, sampled = np.where(selected, trainer, 0.0), np.where(selected, sampled, 0.0)
    _require_logprobs(f"{where}.trainer_logprobs", trainer)
    _require_logprobs(f"{where}.rollout_logprobs", sampled)
    return trainer - sampled, selected


def _require_logprobs(where: str, logprobs: Doubles) -> None:
    wrong = ~((logprobs <= POSITIVE_BY_ROUNDING) & (logprobs >= -LARGEST))  # true for NaN, too
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidRequest(
            f"{where}[{first}] is {logprobs[first]:g} ({int(wrong.sum())} such of {len(logprobs)}): a token that was "
            f"sampled has a finite natural logprob, at most {POSITIVE_BY_ROUNDING:g} above 0 by rounding"
        )
