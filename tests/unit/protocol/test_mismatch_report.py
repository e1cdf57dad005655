"""What a report must hold before any number is looked at."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_service.protocol.mismatch import MismatchReport

SPAN = {"version": 3, "start": 0, "end": 2}
FULL = {"trainer_logprobs": [-1.0, -2], "rollout_logprobs": [-1.0, -2.0], "spans": [SPAN]}


def report_of(*rollouts: dict[str, Any]) -> MismatchReport:
    return MismatchReport.model_validate_json(json.dumps({"rollouts": rollouts}))


def test_spans_with_versions_as_text_are_accepted():
    pasted = {**FULL, "spans": [{**SPAN, "version": "3"}]}
    report = report_of({"replica_id": "r", "completions": [pasted]})
    assert report.rollouts[0].completions[0].spans[0].version == 3


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"completions": [FULL]}, "no replica_id"),
        ({"replica_id": "r", "completions": [{"trainer_logprobs": [-1.0]}]}, "required"),
        ({"replica_id": "r", "completions": [{**FULL, "mask": [1, 0]}]}, "valid boolean"),
        ({"replica_id": "r", "completions": [{**FULL, "trainer_logprobs": ["-1", True]}]}, "valid number"),
        ({"replica_id": "r", "completions": [{**FULL, "trainer_logprobs": [None, -1.0]}]}, "valid number"),
        ({"replica_id": "r", "completions": [{**FULL, "logprobs": []}]}, "not permitted"),
        ({"completions": [{**FULL, "spans": [{**SPAN, "replica_id": "r" * 257}]}]}, "at most 256 characters"),
        ({"replica_id": "r", "completions": [{**FULL, "spans": [{**SPAN, "adapter": "a" * 257}]}]}, "at most 256"),
    ],
)
def test_what_cannot_be_meant_is_refused(rollout, says):
    with pytest.raises(ValidationError, match=says):
        report_of(rollout)
    with pytest.raises(ValidationError, match="at least 1 item"):
        report_of()
