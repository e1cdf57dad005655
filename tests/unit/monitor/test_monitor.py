"""The monitor as the gateway calls it."""

import asyncio
import math

import pytest
import torch

from rollout_service.config import MonitorConfig
from rollout_service.correction import measure_mismatch
from rollout_service.errors import InvalidRequest
from rollout_service.monitor.monitor import LATE_REPORTS, Monitor
from rollout_service.monitor.scoring import MAX_AGE
from tests.unit.monitor.reports import body, full, span


@pytest.fixture
def monitor() -> Monitor:
    return Monitor(MonitorConfig(min_tokens=4), keep_versions=2)


class TestReport:
    async def test_a_report_shows_in_its_row_and_in_the_version_s(self, monitor):
        receipt = await monitor.report(body(full([-1.0, -2.0], [-1.5, -1.0])))
        assert (receipt.tokens, receipt.too_old_tokens, receipt.repeated) == (2, 0, False)
        table = await monitor.table()
        (row,), (merged,) = table.rows, table.versions
        assert (row.version, row.replica_id, row.tokens) == (3, "r1", 2)
        assert merged.model_dump(exclude={"replica_id"}) == row.model_dump(exclude={"replica_id"})
        assert (
            row.k3 == measure_mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2)).k3
        )

    async def test_tokens_are_split_by_the_age_of_their_keys(self, monitor):
        sampled, trained = [-1.0] * 4, [-1.0, -1.5, -2.0, -2.5]
        spans = [span(3, 0, 1), {**span(4, 1, 3), "kv_from": 3}, {**span(500, 3, 4), "kv_from": 3}]
        await monitor.report(body(full(trained, sampled, spans)))
        table = await monitor.table()
        ages = {row.version: [(each.age, each.tokens) for each in row.kv_ages] for row in table.versions}
        assert ages == {4: [(1, 2)], 500: [(MAX_AGE, 1)]}  # of version 3 nothing is kept
        [aged] = next(row.kv_ages for row in table.rows if row.version == 4)
        assert aged.k3 == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(-1.0)) / 2)
        assert aged.prob_error == pytest.approx((math.exp(0.5) + math.exp(1.0)) / 2)
        for kv_from in (4, 3):  # reports are joined by age
            await monitor.report(body(full([-1.0] * 2, [-1.0, -1.5], [{**span(4, 0, 2), "kv_from": kv_from}])))
        [row] = [row for row in await monitor.rows() if row.version == 4]
        assert [(each.age, each.tokens) for each in row.kv_ages] == [(0, 2), (1, 4)]

    async def test_a_report_of_the_same_name_counts_once(self, monitor):
        sent = body(full([-1.0], [-1.5]), report_id="step-4")
        receipts = await asyncio.gather(*(monitor.report(sent) for _ in range(5)))
        assert sorted(receipt.repeated for receipt in receipts) == [False, True, True, True, True]
        assert {receipt.tokens for receipt in receipts} == {1}
        for _ in range(2):  # without a name each counts
            assert not (await monitor.report(body(full([-1.0], [-1.5])))).repeated
        assert [row.tokens for row in await monitor.rows()] == [3]

    async def test_a_report_that_was_refused_may_be_mended_under_its_name(self, monitor):
        with pytest.raises(InvalidRequest):
            await monitor.report(body(full([-1.0], [-1.0]), full([9.0], [-1.0]), report_id="a"))
        assert await monitor.rows() == []
        assert not (await monitor.report(body(full([-1.0], [-1.0]), report_id="a"))).repeated

    async def test_only_so_many_names_are_kept(self, monitor, monkeypatch):
        monkeypatch.setattr("rollout_service.monitor.monitor.REPORT_IDS", 10)
        for i in range(15):
            await monitor.report(body(full([], [], []), report_id=str(i)))
        assert len(monitor._receipts) == 10
        assert (await monitor.report(body(full([], [], []), report_id="10"))).repeated
        assert not (await monitor.report(body(full([], [], []), report_id="0"))).repeated

    async def test_tokens_of_dropped_versions_are_reported_as_too_old(self, monitor):
        for version in (5, 6):
            await monitor.report(body(full([-1.0], [-1.0], [span(version, 0, 1)])))
        receipt = await monitor.report(
            body(full([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [span(4, 0, 2), span(5, 2, 3)]))
        )
        assert (receipt.tokens, receipt.too_old_tokens) == (3, 2)
        receipt = await monitor.report(body(full([-1.0], [-1.0]), truncated_sampling=True))
        assert receipt.truncated_tokens == 1 and (await monitor.table()).truncated == ()
        assert [(row.version, row.tokens) for row in await monitor.rows()] == [(5, 2), (6, 1)]

    async def test_versions_of_a_replaced_log_are_judged(self, monitor):
        def sent(version: int, **more: bool) -> bytes:
            return body(full([-1.0] * 4, [-1.5] * 4, [span(version, 0, 4)]), **more)

        for version in (500, 501):
            await monitor.report(sent(version))
        for _ in range(3):  # late reports between others change nothing
            for _ in range(LATE_REPORTS):
                assert (await monitor.report(sent(499))).too_old_tokens == 4
            await monitor.report(sent(501))
        assert list(await monitor.suspicions()) == [500, 501]
        for i in range(LATE_REPORTS):
            await monitor.report(body(full([], [], [])))
            await monitor.report(sent(1, truncated_sampling=i % 2 == 0))
        assert list(await monitor.suspicions()) == [500, 501]
        receipt = await monitor.report(sent(1))
        assert (receipt.tokens, receipt.too_old_tokens) == (4, 0)
        assert list(await monitor.suspicions()) == [1]
        assert [row.version for row in await monitor.rows()] == [1]


class TestTable:
    async def test_what_is_suspect_names_the_replica(self, monitor):
        right, wrong = [-1.0] * 4, [-1.5] * 4
        await monitor.report(body(full(right, wrong)))
        await monitor.report(body(full(right, right), replica_id="r2"))
        suspicions = await monitor.suspicions()
        (suspicion,) = suspicions.pop(3)
        assert suspicions == {}
        assert (suspicion.replica_id, suspicion.tokens) == ("r1", 4)
        rows = {row.replica_id: row.suspect_since for row in await monitor.rows()}
        assert rows == {"r1": suspicion.since, "r2": None}
        assert [row.suspect_since for row in (await monitor.table()).versions] == [suspicion.since]

    async def test_adapters_have_rows_of_their_own(self, monitor):
        def of(adapter: str, version: int, start: int) -> dict[str, object]:
            return {**span(3, start, start + 1), "adapter": adapter, "adapter_version": version}

        spans = [span(3, 0, 1), of("b", 9, 1), of("a", 10, 2), of("a", 9, 3)]
        for replica in ("r1", "r2"):
            await monitor.report(body(full([-1.0] * 4, [-1.0, -1.0, -2.0, -1.0], spans), replica_id=replica))
        table = await monitor.table()
        merged = [(row.version, row.adapter, row.adapter_version, row.tokens) for row in table.versions]
        assert merged == [(3, None, None, 2), (3, "a", 9, 2), (3, "a", 10, 2), (3, "b", 9, 2)]
        assert len(table.rows) == 8
        named = (await monitor.table(adapter="a")).versions
        assert [(row.adapter_version, row.k1) for row in named] == [(9, 0), (10, -1)]
        assert (await monitor.table(version=4)).rows == ()
        [exact] = (await monitor.table(replica_id="r1", adapter="a@10")).rows
        assert exact == table.rows[4] and exact.replica_id == "r1"
        assert (await monitor.table(adapter="c")).rows == ()
        with pytest.raises(InvalidRequest, match="no adapter's name"):
            await monitor.table(adapter="a@b")

    async def test_suspect_adapter_is_named(self, monitor, caplog):
        spans = [{**span(3, 0, 4), "adapter": "run-a", "adapter_version": 7}]
        await monitor.report(body(full([-1.0] * 4, [-1.5] * 4, spans)))
        [suspicion] = (await monitor.suspicions())[3]
        assert (suspicion.adapter, suspicion.adapter_version) == ("run-a", 7)
        assert "adapter run-a@7 with weight version 3 on replica r1 is suspect" in caplog.text


class TestTruncated:
    async def test_truncated_sampling_does_not_make_a_version_suspect(self, monitor):
        """At top_p 0.9 every ratio is 0.9, beyond both thresholds; without the mark the version would be suspect."""
        kept, model = 0.9, [-1.0] * 5
        sampled = [logprob - math.log(kept) for logprob in model]
        receipt = await monitor.report(body(full(model, sampled), truncated_sampling=True))
        assert (receipt.tokens, receipt.truncated_tokens) == (0, 5)
        assert await monitor.suspicions() == {}
        table = await monitor.table()
        assert table.rows == table.versions == ()
        assert [not_judged.model_dump() for not_judged in table.truncated] == [
            {"version": 3, "replica_id": "r1", "adapter": None, "adapter_version": None, "tokens": 5}
        ]
        await monitor.report(body(full(model, sampled)))
        assert list(await monitor.suspicions()) == [3]

    async def test_truncated_tokens_stand_beside_the_row_of_the_others(self, monitor):
        await monitor.report(body(full([-1.0] * 3, [-1.0] * 3)))
        for _ in range(2):
            await monitor.report(body(full([-2.0], [-1.0]), truncated_sampling=True))
        table = await monitor.table(version=3)
        assert [(row.tokens, row.k1) for row in (*table.rows, *table.versions)] == [(3, 0.0)] * 2
        assert [not_judged.tokens for not_judged in table.truncated] == [2]
        assert (await monitor.table(replica_id="r2")).truncated == ()
        per_replica = await monitor.per_replica()
        assert (per_replica.rows, per_replica.truncated, per_replica.versions) == (table.rows, table.truncated, ())
