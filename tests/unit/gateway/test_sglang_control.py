"""SGLang's and AReaL's control routes, from the bodies of slime 624b824 and AReaL cbff54d."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rollout_service.errors import CommitTimeout, InvalidDelta, NotFound, NotReady, Overtaken
from rollout_service.protocol.fleet import EngineLoad, Fleet, PauseMode, ReplicaStatus
from rollout_service.protocol.rollout import OnAbort
from rollout_service.protocol.upload import CommitUpload
from tests.unit.gateway.fakes import FolderIngest, http_to

LOAD = EngineLoad(running=3, waiting=1, deferred=0, kv_cache_usage=0.25, kv_cache_tokens=4096)
FLEET = Fleet(
    latest_version=7,
    paused=False,
    replicas=(
        ReplicaStatus(replica_id="b", version=7, state="ready", running=4, load=LOAD),
        ReplicaStatus(replica_id="a", version=7, state="ready"),
        ReplicaStatus(replica_id="c", version=None, state="starting"),
    ),
)


@dataclass
class Ingest(FolderIngest):
    """Notes pauses."""

    paused: bool = False
    orders: list[tuple[bool, PauseMode, OnAbort]] = field(default_factory=list)
    overtaken: bool = False
    aborts: int = 0
    drops: int = 0
    replicas: tuple[ReplicaStatus, ...] = FLEET.replicas

    async def abort_running(self, timeout_s: float) -> None:
        self.aborts += 1

    async def set_paused(self, paused: bool, mode: PauseMode, timeout_s: float, on_abort: OnAbort = "continue") -> None:
        if self.overtaken:
            raise Overtaken("another pause")
        self.paused = paused
        self.orders.append((paused, mode, on_abort))

    async def drop_kv_cache(self, timeout_s: float) -> None:
        self.drops += 1

    async def is_paused(self) -> bool:
        return self.paused

    async def fleet(self) -> Fleet:
        return FLEET.model_copy(update={"replicas": self.replicas})


@pytest.fixture
def ingest() -> Ingest:
    return Ingest()


async def test_slime_s_update_by_disk(http, ingest):
    assert (await http.post("/pause_generation", json={})).json()["status"] == "ok"
    assert (await http.get("/flush_cache")).status_code == 200
    body = {"model_path": "/out/weight_v000009", "weight_version": "12"}  # which goes before the name's
    reply = await http.post("/update_weights_from_disk", json=body)
    assert (await http.post("/continue_generation", json={})).json()["status"] == "ok"
    assert reply.status_code == 200
    assert reply.json() == {
        "success": True,
        "message": "every replica serves version 12",
        "num_paused_requests": 0,
        "version": 12,
    }
    assert ingest.orders == [(True, "abort", "return"), (False, "keep", "continue")]
    assert ingest.told == [(Path("/out/weight_v000009"), CommitUpload(mode="keep", wait="all", timeout_s=600.0), 12)]
    assert ingest.labels == ["weight_v000009"]


async def test_slime_s_pull_stages_a_published_version_or_serves_it(http, ingest):
    body = {"source_dir": "/out/deltas", "target_version": 9}
    staged = await http.post("/pull_weights", json={**body, "local_checkpoint_dir": "/nvme/checkpoint"})
    served = await http.post("/pull_weights", json=body)
    message = "version 9 is verified: POST /update_weights_from_disk serves it"
    assert (staged.status_code, staged.json()) == (200, {"success": True, "message": message, "version": 9})
    assert served.json()["message"] == "version 9 is served" and ingest.pulled[1].wait == "all"
    assert [request.model_dump(include={*body}) for request in ingest.pulled] == [body] * 2
    assert str(ingest.pulled[0].local_checkpoint_dir) == "/nvme/checkpoint"


async def test_areal_s_sglang_backend_updates_and_aborts(http, ingest):
    await http.post("/pause_generation", json={})
    await http.post("/pause_generation", json={"mode": "in_place"})
    body = {"model_path": "/out/weight_update_v9", "abort_all_requests": True, "weight_version": "run-7/step-9"}
    assert (await http.post("/update_weights_from_disk", json=body)).json()["success"] is True
    await http.post("/continue_generation", json={})
    assert [order[1:] for order in ingest.orders] == [("abort", "return"), ("keep", "continue"), ("keep", "continue")]
    [(_, request, number)] = ingest.told
    assert (request.mode, number, ingest.labels) == ("abort", 9, ["run-7/step-9"])


async def test_areal_s_vllm_backend_pauses_updates_and_goes_on(http, ingest):
    replies = [
        await http.post("/areal_pause_generation", json={}),
        await http.post("/areal_update_weights", json={"model_path": "/out/weight_update_v9"}),
        await http.post("/areal_continue_generation", json={}),
    ]
    assert [(reply.status_code, reply.json()["success"]) for reply in replies] == [(200, True)] * 3
    assert ingest.orders == [(True, "abort", "return"), (False, "keep", "continue")]
    assert [number for _, _, number in ingest.told] == [9]


async def test_aborting_everything_asks_for_no_pause(http, ingest):
    reply = await http.post("/abort_request", json={"abort_all": True})
    assert (reply.status_code, reply.content, ingest.aborts, ingest.orders) == (200, b"", 1, [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/out/step_9"}),
        ("/areal_update_weights", {"model_path": "/out/step_9"}),
        ("/pull_weights", {"source_dir": "/out", "target_version": 9}),
    ],
)
@pytest.mark.parametrize(
    ("kind", "status"), [(NotFound, 400), (InvalidDelta, 400), (NotReady, 503), (CommitTimeout, 504)]
)
async def test_an_update_that_fails_says_so_in_sglang_s_form(http, ingest, path, body, kind, status):
    ingest.error = kind("why")
    reply = await http.post(path, json=body)
    assert reply.status_code == status
    assert (reply.json()["success"], reply.json()["message"], reply.json()["error"]["type"]) == (
        False,
        "why",
        kind.__name__,
    )
    assert ("Retry-After" in reply.headers) is (kind is NotReady)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/a", "weight_version": "a b"}, "'a b' is neither a decimal"),
        ("/update_weights_from_disk", {"model_path": "/a", "load_format": "flash_rl"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": "/a", "keep_pause": False}, "keep_pause"),
        ("/update_weights_from_disk", {"model_path": "a"}, "send an absolute one"),
        ("/pull_weights", {"source_dir": "/a"}, "target_version"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/continue_generation", {"torch_empty_cache": True}, "torch_empty_cache"),
        ("/abort_request", {"rid": "r"}, "aborting one request by rid is not implemented"),
        ("/abort_request", {}, "send abort_all"),
        ("/init_weights_update_group", {"master_address": "a", "world_size": 2}, "over NCCL"),
        ("/update_weights_from_distributed", {"names": ["a"]}, "over NCCL"),
        ("/areal_init_weights_update_group", {}, "weight_update_mode: disk"),
        ("/areal_set_update_weight_meta", {}, "weight_update_mode: disk"),
        ("/areal_update_weights_xccl", {}, "weight_update_mode: disk"),
        ("/areal_set_update_weight_meta_lora", {"lora_name": "a-v1"}, "/v1/load_lora_adapter for adapters"),
        ("/areal_update_weights_lora_xccl", {"lora_name": "a-v1"}, "/v1/load_lora_adapter for adapters"),
        ("/release_memory_occupation", {}, "engine.enable_sleep_mode"),
        ("/resume_memory_occupation", {}, "engine.enable_sleep_mode"),
    ],
)
async def test_what_is_not_implemented_is_a_400_by_name(http, ingest, path, body, says):
    reply = await http.post(path, json=body)
    assert reply.status_code == 400 and says in reply.json()["message"] and reply.json()["success"] is False
    assert ingest.told == [] and ingest.orders == []


async def test_the_cache_is_flushed_with_and_without_a_pause(http, ingest):
    for method in ("GET", "POST"):
        assert (await http.request(method, "/flush_cache")).status_code == 200
    ingest.paused = True
    assert (await http.get("/flush_cache")).status_code == 200
    assert ingest.drops == 3 and ingest.orders == []


async def test_a_pause_that_was_overtaken_is_a_400(http, ingest):
    ingest.overtaken = True
    reply = await http.post("/pause_generation", json={})
    assert reply.status_code == 400 and reply.json()["message"] == "another pause"


async def test_slime_reads_what_kind_of_server_this_is(services):
    async with http_to(replace(services, tensor_parallel_size=2)) as http:
        info = (await http.get("/server_info")).json()
        assert info == (await http.get("/get_server_info")).json()
        model = (await http.get("/model_info")).json()
        assert model == (await http.get("/get_model_info")).json() == (await http.get("/get_weight_version")).json()
    told = ("tp_size", "pp_size", "disaggregation_mode", "enable_memory_saver", "weight_version")
    assert [info[name] for name in told] == [2, 1, "null", False, "7"]
    assert (model["served_model_name"], model["is_generation"], model["weight_version"]) == ("tiny", True, "7")


async def test_the_arguments_are_those_that_miles_expects(services):
    """miles 31f1ca9 waits for two routes, then ends if an argument is not its own (``sglang_utils/sglang_engine.py``).

    Its ``_compute_server_args``, for an external engine of one GPU with its defaults, and with routing replay.
    """
    expected = {
        "enable_memory_saver": False, "host": "127.0.0.1", "port": 8000, "nnodes": 1, "node_rank": 0, "gpu_id_step": 1,
        "base_gpu_id": 0, "tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "enable_return_routed_experts": True,
    }  # fmt: skip
    async with http_to(replace(services, returns_experts=True)) as http:
        http.base_url = "http://127.0.0.1:8000"
        http.headers["Authorization"] = "Bearer None"
        for path in ("/health_generate", "/flush_cache"):
            assert (await http.get(path)).status_code == 200
        actual = (await http.get("/get_server_info")).json()
    assert {name: actual[name] for name in expected} == expected


async def test_the_load_is_of_what_is_not_answered_yet(http):
    told = (await http.get("/v1/loads?include=core")).json()
    newer = (await http.get("/v1/loads?include=core,disagg,queues")).json()  # slime after 624b824
    assert newer["loads"] == told["loads"]
    assert (await http.get("/v1/loads?include=core,memory")).status_code == 400
    names = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_reqs")
    assert [[rank[name] for name in names] for rank in told["loads"]] == [[0, 0, 0, 0, 0], [1, 3, 1, 4, 4]]
    assert told["aggregate"] == {"total_running_reqs": 3, "total_waiting_reqs": 1, "total_reqs": 4}


@pytest.mark.parametrize(("replicas", "status"), [(FLEET.replicas, 200), ((), 503)], ids=["good", "bad"])
async def test_health_is_empty_whether_good_or_bad(http, ingest, replicas, status):
    ingest.replicas = replicas
    reply = await http.get("/health_generate")
    assert (reply.status_code, reply.content) == (status, b"")
