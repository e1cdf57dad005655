"""What the service answers to generated requests is what its OpenAPI document says, and never its own fault."""

import asyncio

import pytest

from tests.service.conftest import TOKEN
from tests.support.api_cases import ApiCases


def test_replies_to_generated_requests_are_documented(service):
    cases = ApiCases(service.url, TOKEN)
    cases.run(3, derandomize=True)
    assert cases.count >= 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_replies_to_2000_generated_requests_are_documented(service, client):
    cases = ApiCases(service.url, TOKEN)
    await asyncio.to_thread(cases.run, 30, derandomize=False)
    assert cases.count >= 2000
    answered = [statuses for route, statuses in cases.sent.items() if statuses.keys() & {200, 204}]
    assert len(answered) >= 12  # it is not refusals alone that are as documented
    assert not await client.is_paused()
    assert len((await client.generate([5, 6], max_tokens=2, ignore_eos=True)).completions[0].token_ids) == 2
