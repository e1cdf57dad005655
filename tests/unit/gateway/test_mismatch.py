"""The mismatch routes, and what is suspect beside the state of a version."""

import logging
from dataclasses import replace

import pytest

from rollout_service.errors import NotReady
from rollout_service.gateway.mismatch import REPORT_BYTES
from rollout_service.protocol.mismatch import MismatchReceipt, MismatchTable, Suspicion
from rollout_service.protocol.weights import WeightStatus
from tests.unit.gateway.fakes import http_to
from tests.unit.monitor.reports import body, full, span


class Ingest:
    """Knows two versions."""

    async def versions(self) -> list[WeightStatus]:
        return [await self.status(version) for version in (3, 4)]

    async def status(self, version: int) -> WeightStatus:
        return WeightStatus(version=version, state="live")


class Away:
    """A monitor that died."""

    async def suspicions(self) -> dict[int, tuple[Suspicion, ...]]:
        raise NotReady("it died with this call")

    async def report(self, _: bytes) -> MismatchReceipt:
        raise NotReady("it died with this call")


async def test_a_mismatch_report_is_shown_in_the_table(http):
    report = body(full([-1.25, -2.25], [-1.0, -2.0]))
    receipt = MismatchReceipt.model_validate_json((await http.post("/v1/mismatch", content=report)).content)
    assert receipt.tokens == 2
    table = MismatchTable.model_validate_json((await http.get("/v1/mismatch")).content)
    (row,) = table.rows
    assert (row.version, row.replica_id, row.tokens, row.k1) == (3, "r1", 2, 0.25)
    assert row.quantiles == {0.5: 0.25, 0.9: 0.25, 0.99: 0.25, 0.999: 0.25}


async def test_rows_are_filtered_by_the_query(http):
    for version in (3, 4):
        await http.post("/v1/mismatch", content=body(full([-1.0], [-1.0], [span(version, 0, 1)])))

    async def versions(**query: str) -> list[int]:
        return [row["version"] for row in (await http.get("/v1/mismatch", params=query)).json()["rows"]]

    assert await versions() == [3, 4]
    assert await versions(version="4") == [4]
    assert await versions(replica="r1") == [3, 4]
    assert await versions(replica="r2") == []


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"{}", 422, "rollouts Field required"),
        (body(full([1.0], [-1.0])), 422, "rollouts[0].completions[0].trainer_logprobs[0] is 1 "),
        (body(full([float("nan")], [-1.0])), 422, "trainer_logprobs[0] is nan"),
        (b" " * (REPORT_BYTES + 1), 413, "send what is in it in several"),
    ],
)
async def test_a_report_that_cannot_be_counted_says_why(http, content, status, says):
    reply = await http.post("/v1/mismatch", content=content)
    assert reply.status_code == status and says in reply.json()["error"]["message"]


async def test_a_suspect_version_is_shown_as_such_and_others_are_not(services):
    async with http_to(replace(services, ingest=Ingest())) as http:
        await http.post("/v1/mismatch", content=body(full([-1.0] * 4, [-2.0] * 4)))
        shown = WeightStatus.model_validate_json((await http.get("/v1/weights/3")).content)
        listed = (await http.get("/v1/weights")).json()["versions"]
    assert shown.suspect is not None and [suspicion.replica_id for suspicion in shown.suspect] == ["r1"]
    assert [len(version["suspect"]) for version in listed] == [1, 0]


async def test_versions_are_shown_while_the_monitor_is_away(services, caplog):
    unreachable = replace(services, ingest=Ingest(), monitor=Away())
    with caplog.at_level(logging.WARNING, "rollout_service.gateway.mismatch"):
        async with http_to(unreachable) as http:
            shown = (await http.get("/v1/weights/3")).json()
            reported = await http.post("/v1/mismatch", content=body(full([], [], [])))
    assert shown["state"] == "live" and shown["suspect"] is None
    assert reported.status_code == 503 and "died with this call" in reported.json()["error"]["message"]
    assert len(caplog.records) == 1
