"""What an engine on a GPU is given for some work, in each mode."""

from pathlib import Path

from benchmarks.common.gpu_service import EngineOptions, Mode, fitting, graph_sizes, settings_of
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import WorkOptions
from rollout_service.config import ServiceConfig


def test_cuda_graphs_are_for_small_powers_of_two_and_multiples() -> None:
    assert graph_sizes(16, 40) == [1, 2, 4, 8, 16, 32, 48]
    assert graph_sizes(None, 40) is None


def test_every_mode_is_a_configuration(tmp_path: Path) -> None:
    model = write_config(Shape.QWEN3_8B, tmp_path / "model", layers=2)
    work, engine = WorkOptions(prompt_min=10, prompt_max=100, out=50), EngineOptions(graph_step=64)
    for mode in Mode:
        settings = settings_of(mode, model, tmp_path, fitting(work) | engine.settings(work.sequences))
        config = ServiceConfig.model_validate(settings)
        assert (config.engine.max_model_len, config.engine.max_num_seqs) == (192, 256)
        assert config.quant.weights == ("none" if mode == Mode.BF16 else "fp8_block")
        assert config.kv_cache.dtype == ("fp8_e4m3" if mode == Mode.FP8KV else "bfloat16")


def test_an_eager_engine_has_no_graphs() -> None:
    found = EngineOptions(graph_step=64, eager=True).settings(256)
    assert (found["cuda_graph_sizes"], found["enforce_eager"]) == (None, True)


def test_modes_are_not_shared(tmp_path: Path) -> None:
    changed = settings_of(Mode.FP8KV, tmp_path, tmp_path, {})
    changed["kv_cache"]["scales_policy"] = "unit"
    assert "scales_policy" not in settings_of(Mode.FP8KV, tmp_path, tmp_path, {})["kv_cache"]
