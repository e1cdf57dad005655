"""What one process counts, and under which labels."""

import asyncio
import errno
import os
import re
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from rollout_service.errors import InvalidManifest, Overloaded, error_classes
from rollout_service.metrics import process, table
from rollout_service.metrics.process import (
    RaySink,
    count_part,
    count_received,
    count_update,
    counted_commit,
    counted_conversion,
    counted_rollout,
    outcome_of,
    record,
    set_load,
)
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.rollout import Completion, FinishReason, Rollout
from rollout_service.protocol.weights import UploadTimings
from tests.unit.fleet.completions import completion_of
from tests.unit.metrics.counts import Counts

TIMINGS = UploadTimings(receive_s=1.0, quantize_s=2.0, store_s=3.0, finish_s=4.0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    monkeypatch.setattr(process, "sink", counts)
    return counts


def completion(index: int, *versions: int, end: FinishReason = "length") -> Completion:
    """Two tokens of each version."""
    return completion_of((1, 2) * len(versions), *((version, 2) for version in versions), index=index, end=end)


class TestCounted:
    async def test_a_rollout_counts_its_tokens_finish_reasons_and_time(self, counts):
        first, second = completion(1, 1, 1).spans
        moved = completion(1, 1, 1).model_copy(update={"spans": (first, second.model_copy(update={"replica_id": "b"}))})
        completions = (completion(0, 1), moved, completion(2, 1, 2), completion(3, 1, end="stop"))
        rollout = Rollout(request_id="x", prompt_token_ids=(5, 6, 7), completions=completions, replica_id="a")

        @counted_rollout
        async def roll_out() -> Rollout:
            return rollout

        assert await roll_out() is rollout
        assert counts.total(table.REQUESTS, "ok") == 1
        assert counts.total(table.PROMPT_TOKENS) == 3
        assert counts.total(table.COMPLETION_TOKENS) == 12
        assert counts.total(table.COMPLETIONS, "length") == 3 and counts.total(table.COMPLETIONS, "stop") == 1
        assert counts.total(table.MIXED_COMPLETIONS) == 1  # one version on two replicas is not mixed
        assert len(counts.values[(table.TIME_TO_LAST_TOKEN.name,)]) == 1

    async def test_a_rollout_that_was_cancelled_counts_as_that(self, counts):
        @counted_rollout
        async def roll_out() -> Rollout:
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(roll_out())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counts.values == {(table.REQUESTS.name, "cancelled"): [1.0]}

    async def test_commits_count_by_outcome_and_only_successes_are_timed(self, counts):
        @counted_commit
        async def commit(version: int) -> int:
            if version == 2:
                raise InvalidManifest("no")
            return version

        assert await commit(1) == 1
        with pytest.raises(InvalidManifest):
            await commit(2)
        assert counts.total(table.COMMITS, "ok") == counts.total(table.COMMITS, "InvalidManifest") == 1
        assert len(counts.values[(table.COMMIT_SECONDS.name,)]) == 1

    def test_a_conversion_counts_its_input_bytes_when_it_is_finished(self, counts):
        tensors = [("a", torch.zeros(4, dtype=torch.bfloat16)), ("b", torch.zeros(8, dtype=torch.bfloat16))]
        converted = counted_conversion(lambda given: ((name, tensor.float()) for name, tensor in given), tensors)
        assert next(converted)[0] == "a" and not counts.values
        assert [name for name, _ in converted] == ["b"]
        assert counts.total(table.QUANTIZE_BYTES) == 24
        assert counts.total(table.QUANTIZE_SECONDS) > 0

    @pytest.mark.parametrize("is_readable", [True, False])
    def test_an_update_counts_its_bytes_and_the_time_of_each_stage(
        self, counts, tmp_path, monkeypatch, caplog, is_readable
    ):
        def stale(path: Path, pattern: str) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

        for name, nbytes in (("model-1.safetensors", 100), ("model-2.safetensors", 11), ("manifest.json", 1000)):
            (tmp_path / name).write_bytes(bytes(nbytes))
        if not is_readable:
            monkeypatch.setattr(Path, "glob", stale)
        count_update(UpdateTimings(stage_s=3.0, closed_s=2.0, load_s=1.5), tmp_path)
        assert counts.total(table.UPDATES, "ok") == 1
        assert counts.total(table.UPDATE_BYTES) == (111 if is_readable else 0)
        assert is_readable or f"{tmp_path} are not counted" in caplog.text
        told = re.findall(r"(\w+) \(", table.UPDATE_SECONDS.description)
        assert [counts.total(table.UPDATE_SECONDS, stage) for stage in told] == [3.0, 2.0, 1.5]

    def test_parts_and_versions_count_with_their_bytes_by_how_they_came(self, counts):
        count_part(10)
        count_part(5)
        assert counts.total(table.UPLOAD_PARTS) == 2 and counts.total(table.UPLOAD_BYTES) == 15
        count_received("delta", 10, 1000, TIMINGS)
        count_received("delta", 0, 1000, TIMINGS)  # nothing had changed
        count_received("parts", 1000, 1000, TIMINGS)
        assert (
            counts.total(table.VERSIONS_RECEIVED, "delta") == 2 and counts.total(table.VERSIONS_RECEIVED, "parts") == 1
        )
        assert counts.total(table.RECEIVED_BYTES, "delta") == 10
        assert counts.total(table.RECEIVED_VERSION_BYTES, "delta") == 2000
        seconds = {stage: counts.total(table.RECEIVED_SECONDS, "delta", stage) for stage in ("receive", "finish")}
        assert seconds == {"receive": 2.0, "finish": 8.0}

    def test_an_idle_engine_shows_zeros_and_not_nothing(self, counts):
        set_load(0.0, 0.0, 0.0)
        assert counts.values == {
            (table.SEQUENCES.name, "running"): [0.0],
            (table.SEQUENCES.name, "waiting"): [0.0],
            (table.KV_USAGE.name,): [0.0],
        }


class TestRecord:
    def test_an_outcome_is_a_class_of_the_error_tree_or_one_word(self):
        from_another_process = RayTaskError("generate", "", Overloaded("full")).as_instanceof_cause()
        assert outcome_of(from_another_process) == "Overloaded"
        assert outcome_of(asyncio.CancelledError()) == "cancelled"
        assert outcome_of(OSError(28, "disk full")) == outcome_of(KeyError("x")) == "Exception"
        assert all(outcome_of(cls("x")) == name for name, cls in error_classes().items())

    def test_undeclared_labels_and_metrics_of_the_services_state_are_refused(self):
        for labels in ({}, {"outcome": "ok", "version": "3"}, {"version": "3"}):
            with pytest.raises(ValueError, match="a process metric of"):
                record(table.REQUESTS, **labels)
        with pytest.raises(ValueError, match="a service metric"):
            record(table.LATEST_VERSION, 3)

    @pytest.mark.parametrize("metric", [table.REQUESTS, table.SEQUENCES, table.UPDATE_SECONDS], ids=lambda m: m.kind)
    def test_without_a_ray_cluster_recording_does_nothing(self, metric):
        assert not ray.is_initialized()
        RaySink().record(metric, 1.0, dict.fromkeys(metric.labels, "x"))
        assert not ray.is_initialized()
