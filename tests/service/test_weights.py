"""Weights through the real gateway: uploads, paths, conflicts, and versions that must fail."""

import httpx
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from rollout_service.errors import InvalidManifest, QuantizationError, VersionConflict
from rollout_service.model.convert import tensor_bytes
from rollout_service.protocol.upload import PART_DIGEST_HEADER, UPLOAD_KEY_HEADER, UploadPlan, listener_proof
from tests.support.telltale import assert_pure, canary_weights


async def test_weights_are_taken_from_a_path_below_an_allowed_root(service, client, sources, next_version):
    folder = sources / f"step-{next_version}"
    folder.mkdir()
    save_file(canary_weights(service.config.model.path, next_version), folder / "model.safetensors")
    status = await client.push_path(next_version, folder)
    assert status.state == "live"
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (next_version,)
    assert_pure(completion)


async def test_direct_parts_need_a_key_and_gateway_parts_the_token(service, http, next_version):
    weights = canary_weights(service.config.model.path, next_version)
    tensors = [{"name": name, "dtype": "bfloat16", "shape": list(t.shape)} for name, t in weights.items()]
    reply = await http.post("/v1/weights", json={"version": next_version, "tensors": tensors})
    plan = UploadPlan.model_validate_json(reply.content)
    assert plan.upload_url is not None and plan.upload_key is not None
    data = b"".join(bytes(tensor_bytes(tensor)) for tensor in weights.values())[: 2 * plan.part_bytes]
    first, second = data[: plan.part_bytes], data[plan.part_bytes :]
    async with httpx.AsyncClient(base_url=plan.upload_url, timeout=None) as direct:
        path, nonce = f"/v1/weights/{next_version}", "0123456789abcdef"
        proof = (await direct.get(f"{path}/listener", params={"nonce": nonce})).json()["proof"]
        assert proof == listener_proof(plan.upload_key, nonce)
        digest = {PART_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(first)}
        assert (await direct.put(f"{path}/parts/0", content=first, headers=digest)).status_code == 401
        key = {UPLOAD_KEY_HEADER: plan.upload_key}
        assert (await direct.put(f"{path}/parts/0", content=first, headers=digest | key)).status_code == 200
    digest = {PART_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(second)}
    assert (await http.put(f"{path}/parts/1", content=second, headers=digest)).status_code == 200
    assert (await http.delete(path)).status_code == 204


async def test_an_fp8_push_has_half_the_bytes_and_the_same_version(service, client, next_version):
    weights = canary_weights(service.config.model.path, next_version)
    sent: list[int] = []
    by_trainer = await client.push_weights(
        next_version, weights, quantize="trainer", progress=lambda _, total: sent.append(total)
    )
    assert by_trainer.state == "live"
    assert sent[-1] < 0.55 * sum(tensor.nbytes for tensor in weights.values())
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (next_version,)
    assert_pure(completion)
    by_service = await client.push_weights(next_version + 1, weights)
    assert by_service.digest == by_trainer.digest


async def test_a_delta_reaches_every_replica_and_is_the_version_that_all_bytes_make(service, client, next_version):
    model, done = service.config.model.path, list[tuple[int, int]]()
    for version in (next_version, next_version + 1):
        pushed = await client.push_weights(
            version,
            canary_weights(model, version),
            transport="delta",
            progress=lambda *at: done.append(at),
        )
        assert pushed.state == "live" and done[-1] == (pushed.total_bytes, pushed.total_bytes)
        rollouts = await client.generate_batch([[5, 6]] * 16, max_tokens=4, temperature=0.0)
        for completion in (rollout.completions[0] for rollout in rollouts):
            assert completion.versions == (version,)
            assert_pure(completion)
    assert pushed.uploaded_bytes is not None and 0 < pushed.uploaded_bytes < 0.01 * pushed.total_bytes
    whole = await client.push_weights(next_version + 2, canary_weights(model, next_version + 1))
    assert whole.digest == pushed.digest


async def test_a_pickle_is_never_opened(client, sources, next_version):
    folder = sources / "pickled"
    folder.mkdir()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidManifest, match=r"pickles \(pytorch_model.bin\)"):
        await client.push_path(next_version, folder)


async def test_a_nan_is_named_and_the_previous_version_stays_live(service, client, telltale):
    name = "model.layers.1.mlp.up_proj.weight"
    weights = canary_weights(service.config.model.path, telltale + 1)
    weights[name][3, 5] = float("nan")
    with pytest.raises(QuantizationError, match=f"{name}\\[3, 5\\] is nan"):
        await client.push_weights(telltale + 1, weights)
    assert (await client.fleet()).latest_version == telltale
    assert_pure((await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0])
    status = await client.push_weights(telltale + 1, canary_weights(service.config.model.path, telltale + 1))
    assert status.state == "live"


async def test_versions_only_grow(service, client, telltale):
    with pytest.raises(VersionConflict) as refused:
        await client.push_weights(telltale - 1, canary_weights(service.config.model.path, telltale + 1))
    assert {*refused.value.detail} >= {"latest_version"} or len(set(refused.value.detail["digests"])) == 2


async def test_a_repeated_push_is_idempotent_and_other_bytes_conflict(service, client, telltale):
    same = canary_weights(service.config.model.path, telltale)
    assert (await client.push_weights(telltale, same)).digest == (await client.weights(telltale)).digest
    with pytest.raises(VersionConflict) as refused:
        await client.push_weights(telltale, canary_weights(service.config.model.path, telltale + 1))
    assert len(set(refused.value.detail["digests"])) == 2
