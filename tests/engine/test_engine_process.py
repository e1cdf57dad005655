"""A bare engine in a process of its own, as ``benchmarks.rollout.decode_step`` uses it."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.common.gpu_service import Mode, settings_of
from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.group_attention import asked
from benchmarks.rollout.engine_process import EngineGone, EngineProcess, NotRecorded, Recording, Turn, stop_all

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
WORK = asked("2x4x64+32")


@pytest.mark.slow  # an engine of its own
def test_it_runs_turns_records_steps_and_ends(tmp_path: Path) -> None:
    """Recording goes as far as a trace with the steps that were asked for, in which there are no kernels of a GPU."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[Shape.QWEN3_8B] | SMALL))
    engine = {"block_size": 32, "max_model_len": 256, "max_num_seqs": WORK.sequences, "cpu_kv_cache_gib": 1}
    until = time.monotonic() + 300
    good = EngineProcess("good", settings_of(Mode.BF16, model, tmp_path, engine), tmp_path / "traces")
    refused = EngineProcess("refused", settings_of(Mode.BF16, model, tmp_path, engine | {"block_size": -1}), tmp_path)
    try:
        with pytest.raises(EngineGone, match="refused"):
            refused.started(until)
        assert good.started(until).kv_tokens >= WORK.kv_tokens
        samples = [good.turn(Turn(WORK, "1", warm_up=True), until), good.turn(Turn(WORK, "2"), until)]
        assert [sample.tokens for sample in samples] == [WORK.output_tokens // 8, WORK.output_tokens]
        assert all(sample.seconds > 0 and sample.short_s > 0 for sample in samples)
        for steps in (4, 5):
            recorded = good.record(Recording(WORK, steps), until)
            assert isinstance(recorded, NotRecorded) and f"0 kernels of {steps} steps" in recorded.why
    finally:
        stop_all([good, refused])
    with pytest.raises(OSError):
        good.started(until)
