"""Updates from a folder: prime-rl's admin plane, from the bodies that it sends (559b447), and what all APIs share."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rollout_service.errors import (
    CommitTimeout,
    DeploymentFailed,
    Forbidden,
    InsufficientStorage,
    InvalidManifest,
    LogCorrupt,
    NotFound,
    NotReady,
    QuantizationError,
    VersionConflict,
)
from rollout_service.gateway.update_weights import number_of, update_from_folder
from rollout_service.protocol.fleet import PauseMode
from tests.unit.gateway.fakes import FolderIngest, Silent


@dataclass
class Ingest(FolderIngest):
    """Pauses, too."""

    paused: list[tuple[bool, PauseMode, bool]] = field(default_factory=list)

    async def set_paused(self, paused: bool, mode: PauseMode, timeout_s: float, *, clear_cache: bool = True) -> None:
        self.paused.append((paused, mode, clear_cache))


@pytest.fixture
def ingest() -> Ingest:
    return Ingest()


async def test_prime_rl_updates_between_pause_and_resume(http, ingest):
    assert (await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})).status_code == 200
    reply = await http.post("/update_weights", json={"weight_dir": "/out/broadcasts/step_7"})
    assert (await http.post("/resume")).status_code == 200
    assert reply.status_code == 200 and reply.json() == {"status": "ok", "version": 7}
    assert ingest.paused == [(True, "keep", False), (False, "keep", True)]
    [(folder, request, number)] = ingest.told
    assert (folder, number, request.mode, request.wait) == (Path("/out/broadcasts/step_7"), 7, "keep", "all")


async def test_no_folder_is_prime_rl_s_nccl_and_refused(http):
    reply = await http.post("/update_weights", json={"weight_dir": None})
    assert reply.status_code == 422 and 'set weight_broadcast.type = "filesystem"' in reply.text.replace("\\", "")


@pytest.mark.parametrize("body", [{}, {"weight_dir": "/a", "update_info": {}}, {"weight_dir": "/a", "other": 1}])
async def test_a_body_of_neither_client_is_refused(http, ingest, body):
    assert (await http.post("/update_weights", json=body)).status_code == 422
    assert ingest.told == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (Forbidden, 403),
        (NotFound, 404),
        (InvalidManifest, 422),
        (QuantizationError, 422),
        (VersionConflict, 409),
        # prime-rl sends after any 5xx again: only what that may cure is one
        (InsufficientStorage, 409),
        (LogCorrupt, 409),
        (DeploymentFailed, 409),
        (NotReady, 503),
        (CommitTimeout, 504),
    ],
)
async def test_only_what_a_repeat_may_cure_is_a_5xx(http, ingest, kind, status):
    ingest.error = kind("why")
    reply = await http.post("/update_weights", json={"weight_dir": "/out/step_7"})
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == kind.__name__ and reply.json()["error"]["message"] == "why"


@pytest.mark.parametrize(
    ("folder", "number"),
    [
        ("/out/broadcasts/step_7", 7),
        ("/out/broadcasts/step_7/", 7),
        ("/out/global_step_40", 40),
        ("/tmp/weight_v000007", 7),
        ("/out/weight_update_v12", 12),
        ("/out/step_0", 0),
        ("/out/qwen_2025", None),
        ("/out/step_7/hf", None),
        ("/out/my_weight_v7", None),
        ("/out/step_" + "9" * 16, None),
        ("/", None),
    ],
)
def test_the_number_that_a_folder_s_name_tells(folder, number):
    assert number_of(folder) == number


@pytest.mark.parametrize(
    ("folder", "label", "told"),
    [
        ("/out/broadcasts/step_7", None, "step_7"),
        ("/out/broadcasts/7", None, None),
        ("/out/a folder", None, None),
        ("/out/" + "x" * 129, None, None),
        ("/out/step_7", "run-7/step-7", "run-7/step-7"),
    ],
)
async def test_a_version_is_labelled_by_its_folder(services, ingest, folder, label, told):
    await update_from_folder(services, folder, label=label, timeout_s=5.0)
    assert ingest.labels == [told] and ingest.told[0][1].timeout_s == 5.0


async def test_the_wait_for_a_conversion_ends(services):
    with pytest.raises(CommitTimeout, match=r"still being read and converted after 0\.01 s"):
        await update_from_folder(replace(services, ingest=Silent()), "/out/step_7", timeout_s=0.01)
