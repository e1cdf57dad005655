"""A trainer that goes back: an older version becomes the newest again, and the trainer goes on from there."""

import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import NotFound, VersionConflict
from rollout_service.protocol.rollout import Completion
from tests.support.telltale import canary_weights, token_of

PROMPT = [5, 6, 7, 9, 11]
LABEL = "going-back/step-{}"


async def sampled(client: RolloutClient, version: int | str) -> Completion:
    rollout = await client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, min_weight_version=version)
    return rollout.completions[0]


async def test_a_trainer_goes_back_and_on(service, client, http):
    model, first = service.config.model.path, (await client.fleet()).latest_version + 1
    numbers, before = [], []
    for step in (1, 2, 3):
        status = await client.push_weights("next", canary_weights(model, first + step), label=LABEL.format(step))
        assert (status.state, status.label) == ("live", LABEL.format(step))
        numbers.append(status.version)
        before.append(await sampled(client, LABEL.format(step)))
    assert numbers == [first, first + 1, first + 2]
    for step, completion in zip((1, 2, 3), before, strict=True):
        assert set(completion.token_ids) == {token_of(first + step)}
        assert {(s.version, s.label) for s in completion.spans} == {(numbers[step - 1], LABEL.format(step))}

    # the trainer's own count begins again, and is in the way
    with pytest.raises(VersionConflict, match=r"such as 'next', .* rollback\(to=…\)"):
        await client.push_weights(first + 1, canary_weights(model, first + 9))

    back = await client.rollback(to=LABEL.format(1))
    assert (back.version, back.rollback_of, back.state) == (first + 3, first, "live")
    assert back.digest == (await client.weights(first)).digest
    again = await sampled(client, back.version)
    assert again.token_ids == before[0].token_ids
    assert again.logprobs == pytest.approx(before[0].logprobs, abs=1e-3)
    assert {(s.version, s.label) for s in again.spans} == {(back.version, LABEL.format(1))}
    assert (await client.rollback(to=LABEL.format(1))).version == back.version  # nothing changes

    fleet = await client.fleet()
    assert (fleet.latest_version, fleet.latest_label) == (back.version, LABEL.format(1))
    assert {(r.version, r.label) for r in fleet.replicas} == {(back.version, LABEL.format(1))}

    on = await client.push_weights("next", canary_weights(model, first + 7), label=LABEL.format(2))
    assert on.version == first + 4
    newest = await sampled(client, LABEL.format(2))  # the newest of the two that have this label
    assert set(newest.token_ids) == {token_of(first + 7)} and newest.versions == (on.version,)

    with pytest.raises(NotFound, match="kept are"):
        await client.rollback(to=0)
    unknown = await http.post("/inference/v1/generate", json={"token_ids": PROMPT, "min_weight_version": "never/was"})
    assert unknown.status_code == 404 and LABEL.format(2) in unknown.json()["error"]["message"]
