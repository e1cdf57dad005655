"""The report of ``rollout-service inspect``: its sums, and what it says of a model."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from rollout_service.cli.inspect_model import ModelReport, inspect_model, print_report
from rollout_service.config import ModelConfig, QuantConfig
from tests.support.models import FAMILIES, make_model, stored_shapes


@pytest.fixture(scope="module")
def qwen3_30b_a3b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published shapes and nothing else."""
    folder = tmp_path_factory.mktemp("models") / "qwen3-30b-a3b"
    Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


def printed(report: ModelReport, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_model_of_30b_parameters_is_half_as_large_in_fp8(qwen3_30b_a3b):
    report = inspect_model(ModelConfig(path=qwen3_30b_a3b), QuantConfig())
    linear = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048)
    rest = 2 * 151936 * 2048 + 48 * (128 * 2048 + 2 * 128 + 2 * 2048) + 2048
    assert report.parameters == linear + rest == 30_532_122_624
    assert report.bf16_bytes == 2 * (linear + rest)
    assert report.stored_bytes == linear + 4 * linear // 128**2 + 2 * rest
    assert sum(row.count for row in report.kinds) == 48 * (6 + 3 * 128 + 1 + 2) + 3


def test_the_report_says_what_attends_and_cuts_no_cell(qwen3_30b_a3b):
    report = inspect_model(ModelConfig(path=qwen3_30b_a3b), QuantConfig(), 2)
    assert report.attention.backends == ("FLASH_ATTN",)
    assert "auto takes it, and not group: no engine of 2 GPUs was measured with it" in report.attention.why
    assert "Attention on a Hopper GPU: FLASH_ATTN: auto takes it" in " ".join(printed(report, 200))
    for width in (200, 60):
        lines = printed(report, width)
        assert max(map(len, lines)) <= width and "…" not in "".join(lines)


@pytest.mark.parametrize(("weights", "dtype"), [("fp8_channel", "FP8"), ("int8_channel", "INT8")])
def test_channels_have_a_scale_each(qwen3_30b_a3b, weights, dtype):
    report = inspect_model(ModelConfig(path=qwen3_30b_a3b), QuantConfig(weights=weights), 16)
    linear = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048)
    channels = 48 * (4096 + 2 * 512 + 2048 + 128 * (2 * 768 + 2048))
    rest = 2 * 151936 * 2048 + 48 * (128 * 2048 + 2 * 128 + 2 * 2048) + 2048
    assert report.stored_bytes == linear + 4 * channels + 2 * rest
    assert {row.dtype for row in report.kinds} == {dtype, "BF16"}


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "mixtral"])
def test_the_report_counts_every_tensor_of_a_version_once(family, tmp_path):
    report = inspect_model(ModelConfig(path=make_model(tmp_path, family)), QuantConfig())
    stored = stored_shapes(tmp_path)
    copies = 1 if report.model_type == "qwen2" else 0  # the tied output head
    assert sum(row.count for row in report.kinds) == len(stored) + copies
    assert report.parameters == sum(map(math.prod, stored.values()))
    assert all((row.why_not == "") is (row.dtype == "FP8") for row in report.kinds)


def test_what_must_stay_in_fp32_is_counted_with_four_bytes(tmp_path):
    FAMILIES["deepseek_v3"]().save_pretrained(tmp_path)
    (row,) = (row for row in inspect_model(ModelConfig(path=tmp_path), QuantConfig()).kinds if row.dtype == "FP32")
    assert row.name == "mlp.gate.e_score_correction_bias" and row.stored_bytes == 2 * row.bf16_bytes == 4 * 8


def test_whole_experts_on_each_gpu_are_counted_and_not_cut(qwen3_30b_a3b):
    report = inspect_model(ModelConfig(path=qwen3_30b_a3b), QuantConfig(), 4, expert_parallel=True)
    assert report.experts_per_gpu == (32, 32)
    assert all(row.dtype == "FP8" for row in report.kinds if row.shard is not None)
    shards = {row.name: row.shard for row in report.kinds}
    assert shards["mlp.experts.*.up_proj"] == (768, 2048) and shards["self_attn.o_proj"] == (2048, 1024)
    title = " ".join(" ".join(printed(report, 200)).split())
    assert "billion parameters, cut for 4 GPUs with 32 whole experts each" in title
    with pytest.raises(ValueError, match=r"set engine\.expert_parallel: true.*tensor_parallel_size: 1 or 2;"):
        inspect_model(ModelConfig(path=qwen3_30b_a3b), QuantConfig(), 4)


class TestSmallFiles:
    """What would fail once all weights are there is told by config.json, the index and the files' headers."""

    @staticmethod
    def refusal(folder: Path) -> str:
        with pytest.raises(ValueError) as refused:
            inspect_model(ModelConfig(path=folder), QuantConfig())
        return str(refused.value)

    @pytest.mark.parametrize(
        ("method", "more"),
        [
            ("awq", {}),
            ("compressed-tensors", {}),
            ("fp8", {"weight_block_size": [64, 64]}),
            ("fp8", {"activation_scheme": "dynamic"}),  # a scale for each tensor
        ],
    )
    def test_a_foreign_quantization_is_named(self, method, more, tmp_path):
        said = {"quant_method": method, **more}
        config = FAMILIES["llama"]().to_dict() | {"quantization_config": said}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert f"quantized with {method}" in self.refusal(tmp_path) and "BF16" in self.refusal(tmp_path)

    def test_our_own_fp8_is_taken(self, tmp_path):
        said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]().to_dict() | {"quantization_config": said}))
        assert inspect_model(ModelConfig(path=tmp_path), QuantConfig()).parameters

    @pytest.mark.parametrize("with_weights", [True, False])
    def test_unknown_tensors_are_named_before_weights_are_read(self, with_weights, tmp_path):
        make_model(tmp_path, "llama")
        names = dict.fromkeys(stored_shapes(tmp_path), "model-1.safetensors")
        if with_weights:
            add_tensors(tmp_path, {"model.layers.0.mlp.up_proj.qweight": torch.ones(1)})
        else:
            (tmp_path / "model.safetensors").unlink()
        inspected = tmp_path / "model.safetensors.index.json"
        if not with_weights:
            inspected.write_text(json.dumps({"weight_map": names}))
            assert inspect_model(ModelConfig(path=tmp_path), QuantConfig()).parameters
            index = {"weight_map": names | {"model.layers.0.mlp.up_proj.qweight": "model-1.safetensors"}}
            inspected.write_text(json.dumps(index))
        assert "1 unknown: model.layers.0.mlp.up_proj.qweight" in self.refusal(tmp_path)

    def test_a_missing_shard_is_named(self, tmp_path):
        folder = make_model(tmp_path, "llama")
        files = {"a": "model.safetensors", "b": "model-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        assert "are missing: model-2.safetensors" in self.refusal(folder)

    def test_a_damaged_tokenizer_is_named(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]().to_dict()))
        (tmp_path / "tokenizer.json").write_text("{")
        assert "tokenizer.json" in self.refusal(tmp_path)


def add_tensors(folder: Path, more: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file)
