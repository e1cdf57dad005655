"""Reports as the client sends them, to the real routes and the real monitor."""

import warnings
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import torch

from rollout_service.client import RolloutClient, SyncRolloutClient, _mismatch
from rollout_service.config import MonitorConfig
from rollout_service.config.engine import EngineConfig
from rollout_service.errors import InvalidRequest
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.monitor.monitor import Monitor
from rollout_service.protocol import truncation
from rollout_service.protocol.mismatch import MismatchReceipt
from rollout_service.protocol.truncation import TruncatedSamplingWarning
from rollout_service.web.auth import Authorizer
from tests.unit.gateway.fakes import EchoEngine
from tests.unit.monitor.reports import rollout

ROLLOUTS = [rollout("a", [-0.5, -1.0, -1.5], [-2.0]), rollout("b", [-0.25, -0.75], [])]
TRAINER = [[-0.75, -1.0, -1.25], [-2.0], [-0.5, -0.75], []]
K1 = (0.25 - 0.25 + 0.25) / 6


@pytest.fixture
def monitor() -> Monitor:
    return Monitor(MonitorConfig())


@pytest.fixture
def transport(monitor: Monitor) -> httpx.ASGITransport:
    services = Services(
        name="model",
        vocab_size=128,
        max_model_len=64,
        tokenizer=None,
        dispatcher=Dispatcher(EchoEngine(), None, EngineConfig()),
        ingest=None,
        authorizer=Authorizer(None),
        http=httpx.AsyncClient(),
        monitor=monitor,
    )
    return httpx.ASGITransport(create_app(services), client=("127.0.0.1", 1))


@pytest.fixture
async def client(transport: httpx.ASGITransport) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("http://127.0.0.1", transport=transport) as client:
        yield client


def padded(rows: list[list[float]], padding: float) -> list[list[float]]:
    return [row + [padding] * (5 - len(row)) for row in rows]


@pytest.mark.parametrize(
    "trainer",
    [
        TRAINER,
        [torch.tensor(row, requires_grad=True) for row in TRAINER],
        torch.tensor(padded(TRAINER, torch.nan), dtype=torch.bfloat16),
        np.asarray(padded(TRAINER, np.inf), np.float32),
    ],
    ids=["lists", "tensors", "padded-bf16", "padded-array"],
)
async def test_a_trainer_s_logprobs_may_come_in_any_form(client, trainer):
    assert await client.report_mismatch(ROLLOUTS, trainer) == MismatchReceipt(tokens=6)
    (row,) = (await client.mismatch(3)).rows
    assert (row.tokens, row.sequences, row.replica_id) == (6, 3, "r1")
    assert row.k1 == pytest.approx(K1)


async def test_masked_tokens_are_left_out(client):
    trainer = torch.tensor(padded(TRAINER, 0.0))
    trainer[0, 0] = torch.nan
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, 0] = False
    receipt = await client.report_mismatch(ROLLOUTS, trainer, mask)
    assert receipt.tokens == 5
    assert (await client.mismatch()).versions[0].k1 == pytest.approx((-0.25 + 0.25) / 5)


async def test_a_large_batch_becomes_reports_that_may_split_a_rollout(client, monkeypatch, monitor):
    monkeypatch.setattr(_mismatch, "TOKENS_PER_REPORT", 7)  # completions of 3, 1, 2 and 0 tokens in turn
    receipt = await client.report_mismatch(ROLLOUTS * 3, TRAINER * 3)
    assert receipt.tokens == 18
    assert [receipt.tokens for receipt in monitor._receipts.values()] == [6, 6, 6]
    monkeypatch.setattr(_mismatch, "TOKENS_PER_REPORT", 3)
    await client.report_mismatch(ROLLOUTS, TRAINER)
    assert [receipt.tokens for receipt in monitor._receipts.values()][3:] == [3, 3]
    assert (await client.mismatch(3)).versions[0].k1 == pytest.approx(K1)


async def test_a_report_whose_reply_was_lost_is_resent_and_counts_once(transport, monitor):
    class LosesTheFirstReply(httpx.AsyncBaseTransport):
        sent = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            reply = await transport.handle_async_request(request)
            self.sent += 1
            if self.sent == 1:
                raise httpx.ReadError("connection reset", request=request)
            return reply

    losing = LosesTheFirstReply()
    async with RolloutClient("http://127.0.0.1", transport=losing) as client:
        assert (await client.report_mismatch(ROLLOUTS, TRAINER)).tokens == 6
    assert losing.sent == 2
    assert [row.tokens for row in await monitor.rows()] == [6]


@pytest.mark.parametrize(
    ("trainer", "mask", "says"),
    [
        (TRAINER[:3], None, "trainer_logprobs has 3 rows, but the rollouts have 4 completions"),
        ([[-1.0], *TRAINER[1:]], None, r"trainer_logprobs\[0\] has 1 entries, but its completion has 3"),
        ([[-1.0] * 4, *TRAINER[1:]], None, r"trainer_logprobs\[0\] has 4 entries"),
        (torch.zeros(4, 2), None, r"trainer_logprobs\[0\] has 2 entries"),
        (TRAINER, [[True]], "mask has 1 rows"),
        ([[-1.0, float("nan"), -1.0], *TRAINER[1:]], None, r"trainer_logprobs\[0\]\[1\] is nan"),
    ],
)
def test_rows_that_do_not_match_are_refused_before_sending(transport, trainer, mask, says):
    with SyncRolloutClient("http://127.0.0.1", transport=transport) as client:
        with pytest.raises(ValueError, match=says):
            client.report_mismatch(ROLLOUTS, trainer, mask)
        assert client.mismatch().rows == ()


async def test_a_logprob_that_is_none_is_refused_by_the_service(client):
    with pytest.raises(InvalidRequest, match=r"rollouts\[0\].completions\[1\].trainer_logprobs\[0\] is 2"):
        await client.report_mismatch(ROLLOUTS, [TRAINER[0], [2.0], *TRAINER[2:]])
    assert await client.report_mismatch([], []) == MismatchReceipt(tokens=0)


TRUNCATED = [each.model_copy(update={"truncated_sampling": True}) for each in ROLLOUTS]


async def test_truncated_rollouts_are_reported_with_a_single_warning(client, monkeypatch):
    monkeypatch.setattr(truncation, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        renormalized = await client.report_mismatch(TRUNCATED, TRAINER, renormalized=True)
    assert (renormalized.tokens, renormalized.truncated_tokens) == (6, 0)
    with pytest.warns(TruncatedSamplingWarning, match="report_mismatch: .* top_p, .* logit_bias or structured"):
        receipt = await client.report_mismatch(TRUNCATED, TRAINER)
    assert (receipt.tokens, receipt.truncated_tokens) == (0, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await client.report_mismatch(TRUNCATED, TRAINER)
    table = await client.mismatch()
    assert [row.tokens for row in table.rows] == [6] and [each.tokens for each in table.truncated] == [12]
