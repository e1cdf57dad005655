"""Reports as a trainer would send them."""

import json
from typing import Any

from rollout_service.protocol.rollout import Completion, Rollout, Span


def span(version: int, start: int, end: int) -> dict[str, int]:
    return {"version": version, "start": start, "end": end}


def full(
    trainer: list[float], rollout: list[float], spans: list[dict[str, int]] | None = None, **more: Any
) -> dict[str, Any]:
    """A completion that brings everything; by default version 3 sampled it."""
    spans = [span(3, 0, len(rollout))] if spans is None else spans
    return {"trainer_logprobs": trainer, "rollout_logprobs": rollout, "spans": spans, **more}


def body(*completions: dict[str, Any], report_id: str | None = None, **rollout: Any) -> bytes:
    """One rollout of replica r1."""
    report = {"rollouts": [{"replica_id": "r1", "completions": completions, **rollout}], "report_id": report_id}
    return json.dumps(report).encode()


def rollout(request_id: str, *logprobs: list[float], version: int = 3) -> Rollout:
    """As the service returned it, one completion per list."""
    return Rollout(
        request_id=request_id,
        prompt_token_ids=(1,),
        completions=tuple(
            Completion(
                index=index,
                token_ids=tuple(range(len(row))),
                logprobs=tuple(row),
                finish_reason="length",
                spans=(Span(version=version, start=0, end=len(row)),) if row else (),
            )
            for index, row in enumerate(logprobs)
        ),
        replica_id="r1",
    )
