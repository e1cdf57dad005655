"""vLLM's weight-transfer routes, as its clients know them, and the weight routes that only ask."""

from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from rollout_service.errors import NotReady, RolloutServiceError
from rollout_service.protocol.base import MAX_VERSION
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.upload import LARGEST_PART_BYTES, Listener, TrainerRecipe
from rollout_service.protocol.weight_transfer import TransferInit, TransferStatus
from rollout_service.protocol.weights import TensorDigests, WeightStatus
from tests.unit.gateway.fakes import call_and_leave, http_to

INIT = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
RECIPE = TrainerRecipe(weights="fp8_block", scales="power_of_two", quantized=("a", "b"), experts=ExpertNaming())
TENSORS = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


@dataclass
class Ingest:
    """Notes what it is asked, and says that its replicas serve ``serving``."""

    serving: list[int] = field(default_factory=lambda: [4, 4])
    asked: list[Any] = field(default_factory=list)
    failing: RolloutServiceError | None = None
    digests: dict[str, str] = field(default_factory=lambda: {"a": "1", "b": "2"})
    kept: TensorDigests | None = None

    async def snapshot(self, taken: TensorDigests | None = None) -> TensorDigests | None:
        self.kept = taken or self.kept
        return self.kept

    async def init_weight_transfer(self, init: TransferInit) -> None:
        self._note(init)

    async def start_weight_update(self) -> None:
        self._note("start")

    async def update_weights(self, announced: object) -> None:
        self._note(announced)

    async def finish_weight_update(self, label: str | None) -> WeightStatus:
        self._note(label)
        return WeightStatus(version=5, state="live")

    async def listener(self, version: int, node_id: str | None) -> Listener:
        self._note(version)
        return Listener(url="http://ingest", key="k")

    async def shutdown_weight_transfer(self) -> None:
        self._note("shutdown")

    async def drop_kv_cache(self, timeout_s: float) -> None:
        self._note("drop")

    async def weight_transfer(self) -> TransferStatus:
        return TransferStatus(backend="nccl", state="no group", error="the trainer has gone")

    async def recipe(self) -> TrainerRecipe:
        return RECIPE

    async def tensor_digests(self) -> TensorDigests:
        return TensorDigests(version=4, digests=self.digests)

    async def fleet(self) -> Fleet:
        replicas = tuple(
            ReplicaStatus(replica_id=str(i), version=version, state="ready") for i, version in enumerate(self.serving)
        )
        return Fleet(latest_version=4, paused=False, replicas=replicas)

    def _note(self, what: Any) -> None:
        self.asked.append(what)
        if self.failing is not None:
            raise self.failing


@pytest.fixture
def ingest() -> Ingest:
    return Ingest()


@pytest.mark.parametrize(
    ("start", "finish", "label"),
    [
        ({}, {"json": {"weight_version": "5"}}, "5"),
        ({"json": {}}, {"json": {}}, None),  # TRL
        ({"json": {"is_checkpoint_format": True}}, {}, None),  # TRL async, SkyRL
    ],
)
async def test_the_four_phases_of_an_update(http, ingest, start, finish, label):
    replies = [
        await http.post("/init_weight_transfer_engine", json={"init_info": INIT}),
        await http.post("/start_weight_update", **start),
        await http.post("/update_weights", json={"update_info": TENSORS}),
        await http.post("/finish_weight_update", **finish),
        await http.post("/shutdown_weight_transfer_engine"),
    ]
    assert [reply.status_code for reply in replies] == [200] * 5
    assert all(isinstance(reply.json()["message"], str) for reply in replies)
    assert replies[3].json()["weight_version"] == "5"
    assert ingest.asked == [TransferInit.model_validate(INIT), "start", TENSORS, label, "shutdown"]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("init_weight_transfer_engine", {"init_info": {**INIT, "rank_offset": 2}}, "rank_offset=2 is no rank"),
        ("init_weight_transfer_engine", {"init_info": {}}, "init_info.rank_offset"),
        ("start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("start_draft_weight_update", None, "no draft model"),
        ("update_weights", {}, "give either weight_dir, as prime-rl does, or update_info"),
        ("update_weights", {"update_info": TENSORS, "flush": 1}, "flush is not a field here"),
        ("reset_prefix_cache", {"reset_external": True}, "reset_external is not implemented"),
        ("reset_prefix_cache?reset_external=true", None, "reset_external is not implemented"),
        ("weight_checker", {"action": "reset"}, "reset is not implemented"),
        ("init_communicator", {"host": "0.0.0.0", "port": 51216, "world_size": 2}, "use TRL 1.11 or newer"),
        ("weight_checker", {"action": "compare"}, "compare needs a baseline"),
    ],
)
async def test_what_is_not_implemented_is_refused_by_name(http, ingest, path, body, problem):
    reply = await (http.post(path) if body is None else http.post(path, json=body))
    assert reply.status_code == 422 and problem in reply.json()["error"]["message"]
    assert ingest.asked == []


@pytest.mark.parametrize("path", ["update_weights", "finish_weight_update"])
async def test_what_a_trainer_would_send_again_is_409(http, ingest, path):
    ingest.failing = NotReady("the ingest died with this call")
    reply = await http.post(path, json={"update_info": TENSORS} if path == "update_weights" else {})
    assert reply.status_code == 409 and reply.json()["error"]["type"] == "WeightTransferFailed"
    assert "the ingest died with this call. A broadcast cannot be" in reply.json()["error"]["message"]


async def test_the_service_is_one_rank_for_a_trainer(http):
    asked_as_skyrl_does = await http.request("GET", "/get_world_size", json={})
    assert asked_as_skyrl_does.json() == {"world_size": 1}
    assert asked_as_skyrl_does.headers["content-length"] == str(len(asked_as_skyrl_does.content))
    assert (await http.get("/get_world_size?include_dp=false")).json() == {"world_size": 1}


async def test_server_info_has_what_trainers_read(http):
    info = (await http.get("/server_info?config_format=json")).json()
    config = info["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"}
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["lora_config"] is None and config["parallel_config"]["data_parallel_size"] == 1
    assert info["weight_transfer"] == {"backend": "nccl", "state": "no group", "error": "the trainer has gone"}
    assert (await http.get("/server_info?config_format=text")).status_code == 422


@pytest.mark.parametrize(("serving", "newest"), [([4, 4], True), ([3, 4], False), ([], True)])
async def test_what_replicas_serve_is_told(http, ingest, serving, newest):
    ingest.serving = serving
    assert (await http.get("/weight_info")).json() == {"weight_version": str(min(serving, default=4))}
    assert (await http.post("/reset_prefix_cache")).json() == {"success": newest}
    body = {"reset_running_requests": True}
    assert (await http.post("/reset_prefix_cache", json=body)).json() == {"success": newest}
    checked = await http.post("/weight_checker", json={"action": "checksum"})
    assert checked.status_code == (200 if newest else 409)


async def test_running_requests_are_reset_where_caches_are_kept(services, ingest):
    async with http_to(replace(services, keeps_kv_cache=True)) as http:
        assert (await http.post("/reset_prefix_cache")).status_code == 200
        assert ingest.asked == []
        assert (await http.post("/reset_prefix_cache?reset_running_requests=true")).status_code == 200
        assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": True})).status_code == 200
    assert ingest.asked == ["drop"] * 2


async def test_checksums_are_compared_with_a_baseline(http):
    checksums = (await http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
    assert checksums == {"a": "1", "b": "2"}
    same = await http.post("/weight_checker", json={"action": "compare", "baseline": checksums})
    assert same.json() == {"match": True, "mismatches": []}
    other = await http.post("/weight_checker", json={"action": "compare", "baseline": {"a": "0", "c": "2"}})
    assert other.json() == {"match": False, "mismatches": ["a", "b", "c"]}


async def check(http: httpx.AsyncClient, action: str, **options: object) -> tuple[int, dict[str, Any]]:
    """Call SGLang's route, with miles's fields."""
    body = {"action": action, "allow_quant_error": False, "selector": "all", **options}
    reply = await http.post("/weights_checker", json=body)
    return reply.status_code, dict(reply.json())


async def test_sglang_s_checker_compares_with_a_snapshot(http, ingest):
    status, reply = await check(http, "compare")
    assert status == 400 and "call snapshot first" in reply["message"]
    assert (await check(http, "snapshot"))[0] == 200
    assert (await check(http, "compare")) == (
        200,
        {"success": True, "message": "version 4 equals the snapshot of version 4"},
    )
    ingest.digests = {"a": "1", "b": "3"}
    status, reply = await check(http, "compare")
    assert status == 400 and reply["success"] is False
    assert "differs from the snapshot of version 4 in 1 tensors: b" in reply["message"]
    assert (await check(http, "compare", skip_tensor_list=["b"]))[0] == 200
    ingest.serving = [4, 3]
    assert "replicas serve the versions [3] beside 4" in (await check(http, "compare"))[1]["message"]


@pytest.mark.parametrize(
    ("action", "options", "problem"),
    [
        ("reset_tensors", {}, "reset_tensors is not implemented"),
        ("compare", {"allow_quant_error": True}, "allow_quant_error"),
        ("compare", {"selector": "experts"}, "selector"),
    ],
)
async def test_sglang_s_checker_refuses_by_name(http, action, options, problem):
    status, reply = await check(http, action, **options)
    assert status == 400 and problem in reply["message"]


async def test_the_recipe_is_no_version(http):
    reply = await http.get("/v1/weights/recipe")
    assert reply.status_code == 200
    assert TrainerRecipe.model_validate_json(reply.content) == RECIPE


async def test_a_part_larger_than_any_is_refused_before_it_is_read(http, ingest):
    size = {"Content-Length": str(LARGEST_PART_BYTES + 1)}
    reply = await http.put("/v1/weights/1/parts/0", content=b"", headers=size)
    assert reply.status_code == 413 and reply.json()["error"]["detail"] == {"limit_bytes": LARGEST_PART_BYTES}
    assert ingest.asked == []


async def test_a_part_that_is_cut_off_is_malformed(services):
    async def receive(transport_request: httpx.Request) -> httpx.Response:
        await transport_request.aread()
        raise AssertionError("the part arrived whole")

    services = replace(services, http=httpx.AsyncClient(transport=httpx.MockTransport(receive)))
    start, *_ = await call_and_leave(services, "PUT", "/v1/weights/1/parts/0", b"ab", at=None)
    assert start["status"] == 400


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 10**255])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/weights/{}"),
        ("DELETE", "/v1/weights/{}"),
        ("POST", "/v1/weights/{}/commit"),
        ("PUT", "/v1/weights/{}/parts/0"),
        ("GET", "/v1/mismatch?version={}"),
    ],
)
async def test_a_version_out_of_bounds_is_refused_by_every_route(http, method, path, version):
    reply = await http.request(method, path.format(version))
    assert reply.status_code == 422 and "version" in reply.json()["error"]["message"]
