"""A folder's path from a trainer's call to the ingest."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_service.errors import (
    CommitTimeout,
    DeploymentFailed,
    InsufficientStorage,
    NotReady,
    VersionConflict,
)
from rollout_service.gateway.folder_updates import is_worth_repeating, number_of, update_from_folder
from rollout_service.protocol.upload import CommitUpload
from rollout_service.protocol.weights import WeightStatus
from tests.unit.gateway.fakes import FolderIngest


class SlowIngest:
    """Never ends."""

    async def push_folder(self, *_: object) -> WeightStatus:
        await asyncio.Event().wait()
        raise AssertionError


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


async def test_a_folder_is_committed_for_every_replica(services):
    ingest = FolderIngest()
    await update_from_folder(replace(services, ingest=ingest), "/out/step_7", mode="abort", timeout_s=5.0)
    await update_from_folder(replace(services, ingest=ingest), "/out/step_7", number=9)
    assert ingest.told == [
        (Path("/out/step_7"), CommitUpload(mode="abort", wait="all", timeout_s=5.0), 7),
        (Path("/out/step_7"), CommitUpload(mode="keep", wait="all", timeout_s=600.0), 9),
    ]


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
async def test_a_version_is_labelled_by_its_folder(services, folder, label, told):
    ingest = FolderIngest()
    await update_from_folder(replace(services, ingest=ingest), folder, label=label)
    assert ingest.labels == [told]


async def test_the_wait_for_a_conversion_ends(services):
    with pytest.raises(CommitTimeout, match=r"still being read and converted after 0\.01 s"):
        await update_from_folder(replace(services, ingest=SlowIngest()), "/out/step_7", timeout_s=0.01)


@pytest.mark.parametrize(
    ("kind", "worth"),
    [
        (NotReady, True),
        (CommitTimeout, True),
        (DeploymentFailed, False),
        (InsufficientStorage, False),
        (VersionConflict, False),
    ],
)
def test_which_errors_a_repeat_may_cure(kind, worth):
    assert is_worth_repeating(kind("why")) is worth
