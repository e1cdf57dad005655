"""Requests made from the service's own OpenAPI document, and its replies held against that document."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error

load_all_checks()  # which the names below are made by

from schemathesis.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MAX_TOKENS, MOST_COMPLETIONS = 4, 2
"""Of a generated rollout: a schema knows no cost."""
PATIENT_S = 60
UNDONE_BY = {
    **dict.fromkeys(("/pause", "/pause_generation", "/areal_pause_generation", "/abort_request"), "/resume"),
    "/sleep": "/wake_up",
}
"""Routes after which no rollout would end any more, and what goes on."""
MOST_SLEEPS = 10
"""Each has all engines load their weights again."""
VOCABULARY = 100
"""Ids below this are tokens of every model that is served here."""


@dataclass
class ApiCases:
    """Sends generated requests to one service."""

    url: str
    token: str
    sent: dict[str, dict[int, int]] = field(default_factory=dict)
    """Route → status → how many replies."""

    @property
    def count(self) -> int:
        """Requests sent so far, without those that undo a pause."""
        return sum(sum(statuses.values()) for statuses in self.sent.values())

    def run(self, cases: int, *, derandomize: bool) -> None:
        """Send at most ``cases`` valid and ``cases`` invalid requests to each route, and raise the first failure."""
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        for operation in (result.ok() for result in schema.get_all_operations()):
            for mode in GenerationMode:
                strategy = operation.as_strategy(generation_mode=mode)
                configured = settings(
                    max_examples=min(cases, MOST_SLEEPS) if operation.path == "/sleep" else cases,
                    derandomize=derandomize,
                    database=None,
                    deadline=None,
                    phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck),
                )
                if mode is GenerationMode.POSITIVE or operation.body or operation.query or operation.path_parameters:
                    configured(given(strategy)(self._send))()

    def _send(self, case: Case) -> None:
        _make_cheap(case)
        if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            _make_possible(case)
        _make_patient(case)
        headers = {"Authorization": f"Bearer {self.token}"}
        reply = case.call(headers=headers, timeout=60)
        route = f"{case.method} {case.path}"
        statuses = self.sent.setdefault(route, {})
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        if case.path in UNDONE_BY and reply.status_code in (200, 503):
            case.operation.schema[UNDONE_BY[case.path]]["POST"].Case().call(headers=headers, timeout=60)
        case.validate_response(reply, checks=CHECKS, headers=headers)


def _make_cheap(case: Case) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if case.path == "/v1/completions":
        _make_sampling_cheap(body)
    elif case.path == "/inference/v1/generate" and isinstance(body.setdefault("sampling_params", {}), dict):
        _make_sampling_cheap(body["sampling_params"])
    elif case.path == "/generate" and isinstance(body.setdefault("sampling_params", {}), dict):
        _make_sampling_cheap(body["sampling_params"], "max_new_tokens", "min_new_tokens")
    elif case.path == "/init_weight_transfer_engine" and isinstance(body.get("init_info"), dict):
        body["init_info"]["world_size"] = 1  # refused: the trainer of a generated address is waited for, for minutes
    version = body.get("min_weight_version")
    if isinstance(version, int) and version > 0:  # each would be waited for
        body["min_weight_version"] = 0


def _make_possible(case: Case) -> None:
    """What only the served model knows: its name and its vocabulary."""
    body = case.body
    if isinstance(body, dict) and case.path == "/generate":
        if ("input_ids" in body) == ("text" in body):
            body["input_ids"] = [5]
            body.pop("text", None)
        if isinstance(body.get("input_ids"), list):
            body["input_ids"] = _in_vocabulary(body["input_ids"]) or [5]
    if isinstance(body, dict) and case.path in ("/v1/completions", "/inference/v1/generate"):
        body.pop("model", None)
        if case.path == "/inference/v1/generate" and ("token_ids" in body) == ("prompt" in body):
            body["token_ids"] = [5]
            body.pop("prompt", None)
        for name in ("prompt", "token_ids"):
            if isinstance(body.get(name), list):
                body[name] = _in_vocabulary(body[name]) or [5]
        if isinstance(body.get("partial_token_ids"), list):
            body["partial_token_ids"] = _in_vocabulary(body["partial_token_ids"])[: MAX_TOKENS - 1]


def _make_patient(case: Case) -> None:
    """A caller who waits for nothing is told 503 or 504 with reason, which looks like the service's own fault."""
    for parameters in (case.query, case.body):
        timeout_s = parameters.get("timeout_s") if isinstance(parameters, dict) else None
        if isinstance(timeout_s, str):  # in a query, where it is read as a number
            with suppress(ValueError):
                timeout_s = float(timeout_s)
        if isinstance(timeout_s, int | float) and 0 < timeout_s < PATIENT_S:  # others are refused
            parameters["timeout_s"] = PATIENT_S


def _in_vocabulary(prompt: list[Any]) -> list[Any]:
    of_one = [abs(item) % VOCABULARY if isinstance(item, int) else item for item in prompt[:MAX_TOKENS]]
    return [_in_vocabulary(item) or [5] if isinstance(item, list) else item or "5" for item in of_one]


def _make_sampling_cheap(sampling: dict[str, Any], longest: str = "max_tokens", shortest: str = "min_tokens") -> None:
    for name, most in ((longest, MAX_TOKENS), ("n", MOST_COMPLETIONS)):
        value = sampling.get(name)
        if value is None or (isinstance(value, int | float) and value > most):
            sampling[name] = most
    if isinstance(sampling.get(shortest), int):
        sampling[shortest] = min(sampling[shortest], MAX_TOKENS)
