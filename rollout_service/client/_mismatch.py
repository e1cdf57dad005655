"""What a trainer reports of the mismatch, in as many requests as it takes."""

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from rollout_service.client._http import Http, parse
from rollout_service.client._retry import Repeat
from rollout_service.types import Completion, MismatchReceipt, MismatchTable, Rollout

TOKENS_PER_REPORT = 100_000
"""About 4 MB of JSON. One rollout is never divided."""


class Values(Protocol):
    """A tensor or an array, of any device and dtype."""

    def __getitem__(self, index: Any) -> Any: ...
    def __len__(self) -> int: ...
    def tolist(self) -> list[Any]: ...


PerCompletion = Values | Sequence[Values] | Sequence[Sequence[float]]
"""One row per completion, rollout by rollout: padded [completions, tokens], or ragged."""
_Row = tuple[Completion, list[float], list[bool] | None]


class MismatchCalls:
    """The part of RolloutClient that is about the mismatch."""

    _control: Http

    async def report_mismatch(
        self,
        rollouts: Sequence[Rollout],
        trainer_logprobs: PerCompletion,
        mask: PerCompletion | None = None,
        *,
        by_request_id: bool = False,
    ) -> MismatchReceipt:
        """Tell the service which logprobs the trainer computes for what it sampled; it keeps statistics of them.

        Args:
            rollouts: As the service returned them.
            trainer_logprobs: Natural logs of the sampled tokens, at the temperature that they were sampled with and
                before the optimizer step: one row per completion, rollout by rollout. [completions, tokens], padded at
                the end, or ragged: lists, 1-D tensors.
            mask: Which tokens count, of the same form; None: all. What stands elsewhere has no influence.
            by_request_id: Leave the rollouts' own logprobs out: the service remembers them for a while. Half the bytes.

        Raises:
            ValueError: Rows that do not match the completions, or a trainer's logprob that is not finite.
            InvalidRequest: A logprob that is none, such as a positive one.
            NotFound: ``by_request_id``, and some rollouts are not remembered; earlier parts of a batch of more than
                100 000 tokens have been counted by then.
        """
        name, receipts = uuid.uuid4().hex, []
        for number, chunk in enumerate(_chunks(rollouts, _rows(rollouts, trainer_logprobs, mask))):
            body = await asyncio.to_thread(_body, f"{name}-{number}", chunk, by_request_id)
            reply = await self._control.send("POST", "/v1/mismatch", json=body, repeat=Repeat.IDEMPOTENT)
            receipts.append(parse(MismatchReceipt, reply))
        return MismatchReceipt(
            tokens=sum(receipt.tokens for receipt in receipts),
            too_old_tokens=sum(receipt.too_old_tokens for receipt in receipts),
        )

    async def mismatch(self, version: int | None = None) -> MismatchTable:
        """The mismatch of one weight version, or of all that the service keeps, per replica and merged."""
        params = {} if version is None else {"version": str(version)}
        reply = await self._control.send("GET", "/v1/mismatch", params=params, repeat=Repeat.IDEMPOTENT)
        return parse(MismatchTable, reply)


def _rows(rollouts: Sequence[Rollout], trainer: PerCompletion, mask: PerCompletion | None) -> list[_Row]:
    """Completion, the trainer's logprobs, the mask; of every completion."""
    completions = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
    for name, values in (("trainer_logprobs", trainer), ("mask", mask)):
        if values is not None and len(values) != len(completions):
            raise ValueError(f"{name} has {len(values)} rows, but the rollouts have {len(completions)} completions")
    rows: list[_Row] = []
    for i, (rollout, completion) in enumerate(completions):
        where = f"completion {completion.index} of rollout {rollout.request_id}"
        chosen = None if mask is None else [bool(value) for value in _row(mask, i, completion, "mask", where)]
        logprobs = [float(value) for value in _row(trainer, i, completion, "trainer_logprobs", where)]
        if chosen is not None:
            logprobs = [value if counts else 0.0 for value, counts in zip(logprobs, chosen, strict=True)]
        wrong = next((at for at, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if wrong is not None:
            raise ValueError(f"trainer_logprobs of {where}: token {wrong} is {logprobs[wrong]}, but it was sampled")
        rows.append((completion, logprobs, chosen))
    return rows


def _row(values: PerCompletion, i: int, completion: Completion, name: str, where: str) -> list[Any]:
    row, num_tokens = values[i], len(completion.token_ids)
    padded = getattr(values, "ndim", 1) == 2
    if len(row) < num_tokens or (len(row) > num_tokens and not padded):
        raise ValueError(f"{name}[{i}] has {len(row)} entries, but {where} has {num_tokens} tokens")
    row = row[:num_tokens]
    return list(row) if isinstance(row, Sequence) else row.tolist()


def _chunks(rollouts: Sequence[Rollout], rows: list[_Row]) -> Iterator[list[tuple[Rollout, list[_Row]]]]:
    """Whole rollouts with their rows, up to TOKENS_PER_REPORT at once."""
    chunk: list[tuple[Rollout, list[_Row]]] = []
    num_tokens = position = 0
    for rollout in rollouts:
        own = rows[position : position + len(rollout.completions)]
        position += len(own)
        size = sum(len(logprobs) for _, logprobs, _ in own)
        if chunk and num_tokens + size > TOKENS_PER_REPORT:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append((rollout, own))
        num_tokens += size
    if chunk:
        yield chunk


def _body(report_id: str, chunk: list[tuple[Rollout, list[_Row]]], by_request_id: bool) -> dict[str, Any]:
    """JSON of a ``MismatchReport``."""
    return {
        "report_id": report_id,
        "rollouts": [
            {
                "request_id": rollout.request_id,
                "replica_id": rollout.replica_id,
                "completions": [_completion(*row, by_request_id) for row in rows],
            }
            for rollout, rows in chunk
        ],
    }


def _completion(
    completion: Completion, logprobs: list[float], mask: list[bool] | None, by_request_id: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {"trainer_logprobs": logprobs}
    if mask is not None:
        body["mask"] = mask
    if by_request_id:
        return body | {"index": completion.index}
    spans = [span.model_dump() for span in completion.spans]
    return body | {"rollout_logprobs": completion.logprobs, "spans": spans}
