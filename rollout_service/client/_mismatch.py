"""Reports of the trainer's logprobs, split into requests of bounded size."""

import asyncio
import itertools
import math
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from rollout_service.client._http import Http, Repeat, parse
from rollout_service.protocol.mismatch import (
    MismatchReceipt,
    MismatchReport,
    MismatchTable,
    ReportedCompletion,
    ReportedRollout,
)
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.truncation import warn_of_truncated_sampling
from rollout_service.runtime.groups import groups_of

TOKENS_PER_REPORT = 100_000
"""Maximum number of tokens per request, about 4 MB of JSON. A single completion is never split."""


class Values(Protocol):
    """A tensor or an array, on any device and of any dtype."""

    def __getitem__(self, index: slice, /) -> "Values": ...
    def __len__(self) -> int: ...
    def tolist(self) -> list[Any]: ...


PerCompletion = Values | Sequence[Values] | Sequence[Sequence[float]]
"""One row per completion, rollout by rollout: padded [completions, tokens], or ragged."""
_Row = tuple[Rollout, Completion, list[float], list[bool] | None]
"""One completion with its rollout, the trainer's logprobs and the mask."""


class MismatchCalls:
    """The methods of RolloutClient that report and read the mismatch."""

    _control: Http

    def report_mismatch(
        self,
        rollouts: Sequence[Rollout],
        trainer_logprobs: PerCompletion,
        mask: PerCompletion | None = None,
        *,
        renormalized: bool = False,
    ) -> Coroutine[object, None, MismatchReceipt]:
        """Report the trainer's logprobs of sampled tokens. The service keeps statistics of the mismatch.

        Args:
            rollouts: The rollouts, as the service returned them.
            trainer_logprobs: Natural logs of the sampled tokens' probabilities, at the sampling temperature and before
                the optimizer step. One row per completion, rollout by rollout: [completions, tokens] padded at the end,
                or ragged lists or 1-D tensors.
            mask: True for tokens that count, in the same form. None: all tokens count. Masked logprobs have no
                influence.
            renormalized: True if ``trainer_logprobs`` of truncated rollouts are renormalized over their sampling masks
                (``rollout_service.correction.SamplingSupport``). Otherwise such rollouts are counted separately and not
                judged, and one TruncatedSamplingWarning per process is emitted.

        Raises:
            ValueError: Rows do not match the completions, or a logprob of the trainer is not finite.
            InvalidRequest: A logprob is invalid, such as a positive one.
        """
        # Not a coroutine function: SyncRolloutClient runs this part in the caller's thread, because its CUDA stream
        # matters.
        if not renormalized and any(rollout.truncated_sampling for rollout in rollouts):
            warn_of_truncated_sampling("report_mismatch")
        rows = _rows(rollouts, trainer_logprobs, mask)
        chunks = list(groups_of(rows, lambda row: len(row[2]), TOKENS_PER_REPORT))
        return self._send(chunks, renormalized)

    async def _send(self, chunks: list[list[_Row]], renormalized: bool) -> MismatchReceipt:
        name, receipts = uuid.uuid4().hex, []
        for number, chunk in enumerate(chunks):
            body = await asyncio.to_thread(_report, f"{name}-{number}", chunk, renormalized)
            reply = await self._control.send("POST", "/v1/mismatch", json=body, repeat=Repeat.IDEMPOTENT)
            receipts.append(parse(MismatchReceipt, reply))
        return MismatchReceipt(
            tokens=sum(receipt.tokens for receipt in receipts),
            too_old_tokens=sum(receipt.too_old_tokens for receipt in receipts),
            truncated_tokens=sum(receipt.truncated_tokens for receipt in receipts),
        )

    async def mismatch(self, version: int | None = None, *, adapter: str | None = None) -> MismatchTable:
        """Return the mismatch of one weight version, or of all that the service keeps, per replica and merged.

        ``adapter``: only of this adapter, as ``run-a`` or ``run-a@3``.
        """
        params = {} if version is None else {"version": str(version)}
        if adapter is not None:
            params["adapter"] = adapter
        return await self._control.read(MismatchTable, "/v1/mismatch", params)


def _rows(rollouts: Sequence[Rollout], trainer: PerCompletion, mask: PerCompletion | None) -> list[_Row]:
    """Return one row per completion. Raises ValueError."""
    owners = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
    completions = [completion for _, completion in owners]
    scored = _lists("trainer_logprobs", trainer, completions)
    chosen = _lists("mask", mask, completions) if mask is not None else [None] * len(completions)
    rows: list[_Row] = []
    for i, (owner, logprobs, counts) in enumerate(zip(owners, scored, chosen, strict=True)):
        if counts is not None:
            logprobs = [value if count else 0.0 for value, count in zip(logprobs, counts, strict=True)]
        wrong = next((at for at, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if wrong is not None:
            raise ValueError(f"trainer_logprobs[{i}][{wrong}] is {logprobs[wrong]}, but the token was sampled")
        rows.append((*owner, logprobs, None if counts is None else [bool(count) for count in counts]))
    return rows


def _lists(name: str, values: PerCompletion, completions: list[Completion]) -> list[list[float]]:
    """Return one list of plain numbers per completion, without padding."""
    if len(values) != len(completions):
        raise ValueError(f"{name} has {len(values)} rows, but the rollouts have {len(completions)} completions")
    padded = not isinstance(values, Sequence)
    rows = values if isinstance(values, Sequence) else values.tolist()
    found = []
    for i, (row, completion) in enumerate(zip(rows, completions, strict=True)):
        num_tokens = len(completion.token_ids)
        if len(row) < num_tokens or (len(row) > num_tokens and not padded):
            raise ValueError(f"{name}[{i}] has {len(row)} entries, but its completion has {num_tokens} tokens")
        found.append(list(row[:num_tokens]) if isinstance(row, Sequence) else row.tolist())
    return found


def _report(report_id: str, chunk: list[_Row], renormalized: bool) -> dict[str, object]:
    """Return one report as JSON."""
    grouped = [list(rows) for _, rows in itertools.groupby(chunk, key=lambda row: id(row[0]))]
    rollouts = tuple(
        ReportedRollout(
            replica_id=rows[0][0].replica_id,
            completions=tuple(
                ReportedCompletion(
                    trainer_logprobs=logprobs,
                    mask=mask,
                    rollout_logprobs=list(completion.logprobs),
                    spans=completion.spans,
                )
                for _, completion, logprobs, mask in rows
            ),
            truncated_sampling=rows[0][0].truncated_sampling,
            renormalized=renormalized,
        )
        for rows in grouped
    )
    return MismatchReport(report_id=report_id, rollouts=rollouts).model_dump(mode="json", exclude_none=True)
