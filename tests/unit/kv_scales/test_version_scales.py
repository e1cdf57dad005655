"""Which scales a version has: from its trainer, of the version before, or the first that a replica measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest, LogCorrupt, NotFound
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales.coordinator import (
    KV_SCALES_FILE,
    VersionScales,
    read_result,
    write_result,
)
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.kv_scales import KVScaleResult
from rollout_service.store.durable_io import write_sealed
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from tests.support.models import make_model
from tests.unit.ingest.trainer import config_of
from tests.unit.kv_scales.measured import Calibrating, measured, scales_of

ONE, TWO = measured((224, 448, 28)), measured((1, 1, 1))
SCALES = scales_of(1, 2, 0.125)
"""Of ``ONE``: times 1.05 / 448, rounded up to a power of two."""
ONE_EACH, TWO_EACH = measured((224, 224, 224)), measured((448, 448, 448))
Restart = Callable[[], Calibrating]


def came(manifest: Manifest) -> tuple[object, str]:
    return manifest.kv_scales, manifest.kv_scales_from


def version_scales(config: ServiceConfig, model: Path) -> VersionScales:
    """Of an empty log."""
    return VersionScales(config, ServedModel.load(model), WeightLog(config.weights.root))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Restart:
    """An ingest that starts on the log of this test."""

    return lambda: Calibrating(tmp_path / "log", model)


@pytest.fixture
def ingest(start: Restart) -> Calibrating:
    """It has version 0, which awaits its scales."""
    ingest = start()
    ingest.commit(0)
    return ingest


class TestPolicy:
    def test_every_version_without_scales_is_measured(self, start):
        ingest = start()
        for version, (ranks, scales) in enumerate([(ONE_EACH, scales_of(1, 1, 1)), (TWO_EACH, scales_of(2, 2, 2))]):
            assert came(ingest.commit(version)) == (None, "calibrate")
            assert ingest.publish(version, ranks).scales == scales

    def test_a_trainers_scales_hold_until_the_next_is_measured(self, start):
        ingest = start()
        ingest.measure(0, ONE_EACH)
        assert came(ingest.commit(1, SCALES)) == (SCALES, "trainer")
        assert ingest.scales.newest == SCALES
        assert came(ingest.commit(2)) == (None, "calibrate")

    @pytest.mark.parametrize(
        ("policy", "expected"), [("reuse", ["unit", "reuse"]), ("unit", ["unit", "unit"])], ids=["reuse", "unit"]
    )
    def test_nothing_is_measured_unless_the_policy_says_so(self, model, policy, expected):
        config = ServiceConfig.model_validate({"model": {"path": model}, "kv_cache": {"scales_policy": policy}})
        scales, got = version_scales(config, model), []
        for version, brought in enumerate([None, SCALES, None]):
            bare = Manifest(version=version, fingerprint="model", recipe=Recipe(weights="none"), tensors=())
            manifest = scales.with_scales(bare, brought)
            scales.committed(manifest)
            got.append(manifest.kv_scales_from)
        assert [got[0], got[2]] == expected

    @pytest.mark.parametrize(
        ("family", "sections", "reason"),
        [
            ("deepseek_v3", {"kv_cache": {"dtype": "fp8_e4m3"}}, "has no attention layers that take them"),
            (
                "llama",
                {"quant": {"weights": "none"}, "scaling": {"num_gpus": 1}, "kv_cache": {}},
                "quant.weights is none",
            ),
        ],
        ids=["latent attention", "BF16 weights on a GPU"],
    )
    def test_calibrate_is_refused_where_nothing_uses_scales(self, tmp_path, family, sections, reason):
        model = make_model(tmp_path / "model", family)
        kv_cache = sections["kv_cache"] | {"scales_policy": "calibrate"}
        with pytest.raises(ValueError, match=f"kv_cache.scales_policy is calibrate, but .*{reason}"):
            Ingest(config_of(model, tmp_path / "log", **sections | {"kv_cache": kv_cache}))
        Ingest(config_of(model, tmp_path / "log", **sections))

    def test_the_shipped_policy_leaves_a_cache_alone_that_is_bf16(self, tmp_path):
        model = make_model(tmp_path / "model", "deepseek_v3")
        shipped = {"dtype": "auto", "scales_policy": "calibrate"}
        scales = version_scales(config_of(model, tmp_path / "log", kv_cache=shipped), model)
        bare = Manifest(version=0, fingerprint="model", recipe=Recipe(weights="none"), tensors=())
        assert scales.with_scales(bare, None) == bare

    @pytest.mark.parametrize(
        ("sections", "reason"),
        [
            ({"kv_cache": {"dtype": "bfloat16"}}, "kv_cache.dtype is bfloat16"),
            ({"quant": {"weights": "none"}, "scaling": {"num_gpus": 1}}, "quant.weights is none"),
        ],
    )
    def test_scales_are_refused_where_nothing_uses_them(self, model, sections, reason):
        config = ServiceConfig.model_validate({"model": {"path": model}, **sections})
        scales = version_scales(config, model)
        scales.check(None)
        with pytest.raises(InvalidManifest, match=f"brings 3 KV scales, but .*{reason}"):
            scales.check(SCALES)


class TestPublish:
    def test_a_version_that_was_dropped_meanwhile_is_not_found(self, ingest):
        ingest.commit(1)
        ingest.log.drop(0)
        with pytest.raises(NotFound, match="version 0 is not in the log any more"):
            ingest.publish(0, ONE)
        assert ingest.scales.newest is None and not ingest.log.folder(0).exists()

    def test_an_older_version_published_late_changes_no_newer_one(self, ingest):
        ingest.commit(1)
        ingest.publish(1, ONE)
        late = ingest.publish(0, TWO)
        assert late.scales != SCALES and ingest.scales.published(0) == late
        assert ingest.scales.newest == SCALES

    def test_nor_does_it_take_the_place_of_a_trainers_scales(self, ingest):
        ingest.commit(1, scales=SCALES)
        ingest.publish(0, TWO)
        assert ingest.scales.newest == SCALES

    def test_a_newer_version_that_awaits_its_scales_still_does(self, ingest):
        ingest.commit(1)
        ingest.publish(0, ONE)
        assert ingest.scales.published(1) is None


class TestRestart:
    def test_scales_of_before_are_known_while_the_newest_awaits(self, ingest, start):
        ingest.publish(0, ONE)
        ingest.commit(1)
        again = start()
        assert again.scales.newest == SCALES and again.scales.published(1) is None
        assert again.publish(1, measured((0, 0, 0))).scales == SCALES


MEASURED = KVScaleResult(
    version=3,
    scales=scales_of(1, 2, 0.1),
    replica_id="r1",
    tokens=640,
)
FAILED = KVScaleResult(version=0, scales=None, replica_id="r1", tokens=1, error="zero\nthroughout")


class TestFile:
    @pytest.mark.parametrize("result", [MEASURED, FAILED], ids=["measured", "failed"])
    def test_what_is_written_is_read_again(self, tmp_path, result):
        write_result(tmp_path, result)
        assert read_result(tmp_path) == result
        assert [path.name for path in tmp_path.iterdir()] == [KV_SCALES_FILE]

    def test_nothing_is_there_without_a_file_or_a_folder(self, tmp_path):
        assert read_result(tmp_path) is None and read_result(tmp_path / "7") is None

    def test_what_a_crash_left_half_written_does_not_count(self, tmp_path):
        (tmp_path / f".{KV_SCALES_FILE}.tmp").write_text('{"version": 3, "sca')
        assert read_result(tmp_path) is None
        write_result(tmp_path, MEASURED)
        assert read_result(tmp_path) == MEASURED and [path.name for path in tmp_path.iterdir()] == [KV_SCALES_FILE]

    def test_a_torn_file_or_a_flipped_bit_is_corrupt_by_name(self, tmp_path):
        write_result(tmp_path, MEASURED)
        path = tmp_path / KV_SCALES_FILE
        sound = path.read_bytes()
        torn = [sound[:end] for end in range(len(sound) - 1)]  # without its last newline it is whole
        flipped = [
            sound[:i] + bytes([sound[i] ^ bit]) + sound[i + 1 :] for i in range(len(sound) - 1) for bit in (4, 128)
        ]
        for damaged in torn + flipped:
            path.write_bytes(damaged)
            with pytest.raises(LogCorrupt, match=str(path)):
                read_result(tmp_path)

    def test_an_unknown_field_is_corrupt_by_name(self, tmp_path):
        write_sealed(tmp_path / KV_SCALES_FILE, MEASURED.model_dump_json().replace('"tokens"', '"positions"'))
        with pytest.raises(LogCorrupt, match=rf"{KV_SCALES_FILE} does not parse(.|\n)*positions"):
            read_result(tmp_path)
