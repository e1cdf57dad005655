"""Convert a report's numbers to log-ratios per version and replica; errors name the invalid number."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from rollout_service.errors import InvalidRequest, NotFound
from rollout_service.monitor.recent import RecentRollouts
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Key
from rollout_service.protocol.mismatch_report import MismatchReport, ReportedCompletion, ReportedRollout
from rollout_service.protocol.recent_rollout import RecentCompletion, RecentRollout
from rollout_service.protocol.rollout import Span
from rollout_service.web.errors import validation_error

Doubles: TypeAlias = NDArray[np.float64]
_Span: TypeAlias = tuple[int, str, int, int, int]
"""Version, replica, first token, the token after the last, and the age of its keys and values."""
MAX_AGE = 64
"""Highest age of keys and values that is counted on its own, in versions; older ones are counted with it."""
POSITIVE_BY_ROUNDING = 1e-3
"""Maximum logprob. A larger number is a loss, a logit, or a negated logprob."""
LARGEST = float(np.finfo(np.float32).max) / 4  # so that a difference is finite in fp32, too
IDS_SHOWN = 16


def parse_report(body: bytes) -> MismatchReport:
    """Parse the report in a request's body. Raises InvalidRequest, or MalformedRequest for invalid JSON."""
    try:
        return MismatchReport.model_validate_json(body)
    except ValidationError as error:
        raise validation_error("POST /v1/mismatch", error.errors(include_url=False)) from None


def missing_ids(report: MismatchReport, recent: RecentRollouts) -> list[str]:
    """Return the request ids that the report refers to and that are not remembered."""
    return [request_id for request_id in _leans_on(report) if recent.get(request_id) is None]


def require_remembered(report: MismatchReport, recent: RecentRollouts) -> dict[str, RecentRollout]:
    """Return the remembered rollouts that the report refers to. Raises NotFound with all that are not remembered."""
    gone = missing_ids(report, recent)
    if gone:
        raise NotFound(
            f"{len(gone)} of {len(_leans_on(report))} rollouts are not remembered ({', '.join(gone[:IDS_SHOWN])}): "
            "send rollout_logprobs, spans and replica_id with them, or raise monitor.remember_tokens",
            {"request_ids": gone},
        )
    rollouts = {request_id: recent.get(request_id) for request_id in _leans_on(report)}
    return {request_id: rollout for request_id, rollout in rollouts.items() if rollout is not None}


def _leans_on(report: MismatchReport) -> dict[str, None]:
    """Return the request ids of rollouts whose logprobs are left out, in order."""
    return {
        rollout.request_id: None
        for rollout in report.rollouts
        if rollout.request_id is not None and any(c.rollout_logprobs is None for c in rollout.completions)
    }


@dataclass(frozen=True)
class Scored:
    """Statistics of a report, by version and replica."""

    statistics: dict[Key, Statistics]
    truncated: dict[Key, int]
    """Number of tokens of truncated rollouts, which are in no statistic: their ratios contain the kept mass."""


def score(report: MismatchReport, remembered: dict[str, RecentRollout], ratio_bound: float) -> Scored:
    """Compute statistics of each version and replica in the report. Raises InvalidRequest at the first invalid
    number."""
    groups: dict[Key, _Group] = defaultdict(_Group)
    apart: dict[Key, _Group] = defaultdict(_Group)
    for i, rollout in enumerate(report.rollouts):
        into = apart if _is_truncated(rollout, remembered) else groups
        for j, completion in enumerate(rollout.completions):
            where = f"rollouts[{i}].completions[{j}]"
            sampled, spans = _rollout_logprobs(where, rollout, j, remembered)
            _collect(into, spans, *_log_ratio(where, completion, sampled))
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


def _is_truncated(rollout: ReportedRollout, remembered: dict[str, RecentRollout]) -> bool:
    """Return True if the report or the remembered rollout says so: a report with only request ids need not repeat
    it."""
    known = None if rollout.request_id is None else remembered.get(rollout.request_id)
    return not rollout.renormalized and (rollout.truncated_sampling or (known is not None and known.truncated_sampling))


@dataclass
class _Group:
    tokens: list[Doubles] = field(default_factory=list)
    """Log-ratios."""
    by_age: dict[int, list[Doubles]] = field(default_factory=lambda: defaultdict(list))
    """The same by the age of their keys and values."""
    sums: list[float] = field(default_factory=list)
    """Sums of whole sequences."""


def _collect(
    groups: dict[Key, _Group],
    spans: list[_Span],
    log_ratio: Doubles,
    selected: NDArray[np.bool_],
) -> None:
    """Assign each token to its version and replica, and the sequence only if one of them sampled all of it."""
    parts: dict[Key, list[Doubles]] = defaultdict(list)
    for version, replica_id, start, end, age in spans:
        tokens = log_ratio[start:end][selected[start:end]]
        if len(tokens):
            parts[Key(version, replica_id)].append(tokens)
            groups[Key(version, replica_id)].by_age[age].append(tokens)
    for key, tokens_of in parts.items():
        groups[key].tokens += tokens_of
        if len(parts) == 1:
            groups[key].sums.append(float(sum(tokens.sum() for tokens in tokens_of)))


def _rollout_logprobs(
    where: str, rollout: ReportedRollout, position: int, remembered: dict[str, RecentRollout]
) -> tuple[Doubles, list[_Span]]:
    """Return rollout logprobs [tokens], and the spans."""
    completion = rollout.completions[position]
    if completion.rollout_logprobs is not None and completion.spans is not None:
        _require_cover(where, completion.spans, len(completion.rollout_logprobs))
        spans = []
        for span in completion.spans:
            replica_id = span.replica_id or rollout.replica_id
            assert replica_id is not None, "the report would have been refused"
            spans.append((span.version, replica_id, span.start, span.end, _age(span.version, span.oldest_kv)))
        return np.asarray(completion.rollout_logprobs, np.float64), spans
    assert rollout.request_id is not None, "the report would have been refused"
    recent = remembered[rollout.request_id]
    index = position if completion.index is None else completion.index
    known = recent.completions.get(index)
    if known is None:
        raise InvalidRequest(
            f"{where}: rollout {rollout.request_id} has no completion {index}: it has {sorted(recent.completions)}"
        )
    return known.logprobs.astype(np.float64), list(_spans(known))


def _spans(completion: RecentCompletion) -> Iterator[_Span]:
    start = 0
    arrays = completion.versions.tolist(), completion.ends.tolist(), completion.kv_from.tolist()
    for version, end, kv_from, replica_id in zip(*arrays, completion.replicas, strict=True):
        yield version, replica_id, start, end, _age(version, kv_from)
        start = end


def _age(version: int, kv_from: int) -> int:
    return min(max(0, version - kv_from), MAX_AGE)


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


def _log_ratio(where: str, completion: ReportedCompletion, sampled: Doubles) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return ``trainer − rollout`` [tokens], and the mask of counted tokens."""
    trainer = np.asarray(completion.trainer_logprobs, np.float64)
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
