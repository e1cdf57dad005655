"""``rollout-service inspect --fp8-kv``: what a whole model in memory shows, with one layer of it at a time."""

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Olmo2Config
from typer.testing import CliRunner

from rollout_service.cli.inspect_kv import Checkpoint, inspect_kv, layer_by_layer, print_kv_report
from rollout_service.cli.main import app
from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import InvalidManifest, InvalidRequest
from rollout_service.kv_scales import ScaledFrom
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.kv_scales import LayerError
from rollout_service.quant.blockwise import quantize_blockwise
from tests.support.key_channels import loud_weights, uneven_weights
from tests.support.models import FAMILIES, make_model

WITH_KEYS = [family for family in FAMILIES if family != "deepseek_v3" and not family.endswith(("_tp", "_ep"))]
LAYERS = [f"model.layers.{layer}.self_attn" for layer in range(2)]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


def whole_model(folder: Path, batch: list[list[int]]) -> tuple[dict[str, list[float]], dict[str, LayerError]]:
    """Largest values and errors by a model that is in memory, in a pass for each: rows of one length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(batch)
    with torch.no_grad():
        with observe_qkv(model) as first:
            model(ids)
        with observe_qkv(model, measured_with=first.scales("m")) as second:
            model(ids)
    return {name: amax[0].tolist() for name, amax in first.amax().items()}, second.errors()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llama", "llama")


class TestMeasurement:
    @pytest.mark.parametrize("family", WITH_KEYS)
    def test_it_is_that_of_the_whole_model(self, tmp_path: Path, family: str) -> None:
        folder = make_model(tmp_path, family)
        report = inspect_kv(folder, device="cpu")
        batch = CalibrationBatch(KVCalibrationConfig(), ServedModel.load(folder).vocab_size, 1024).sequences()
        largest, errors = whole_model(folder, batch)
        assert [layer.name for layer in report.layers] == list(errors) == LAYERS
        for layer in report.layers:
            assert layer.largest == pytest.approx(largest[layer.name], rel=1e-4)
            for name, error in layer.error:
                assert error == pytest.approx(getattr(errors[layer.name], name), rel=1e-2), (layer.name, name)

    def test_codes_and_scales_are_multiplied(self, llama: Path) -> None:
        before = inspect_kv(llama, device="cpu")
        weights = load_file(llama / "model.safetensors")
        for name in [name for name in weights if "_proj" in name]:
            weights[name], weights[f"{name}_scale_inv"] = quantize_blockwise(weights[name])
        save_file(weights, llama / "model.safetensors")
        for layer, other in zip(inspect_kv(llama, device="cpu").layers, before.layers, strict=True):
            assert layer.largest != other.largest and layer.largest == pytest.approx(other.largest, rel=0.05)

    def test_padding_does_not_count(self, llama: Path, tmp_path: Path) -> None:
        rows = [[5, 6, 7, 8, 9, 10], [11, 12]]
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(f"{row}\n" for row in rows))
        report = inspect_kv(llama, prompts=prompts, device="cpu")
        assert (report.tokens, report.measured_on) == (8, "given prompts")
        alone = [whole_model(llama, [row])[0] for row in rows]
        for layer in report.layers:
            expected = [max(values) for values in zip(*(largest[layer.name] for largest in alone), strict=True)]
            assert layer.largest == pytest.approx(expected, rel=1e-4)

    def test_one_layer_at_a_time_is_in_memory(self, llama: Path) -> None:
        served = ServedModel.load(llama)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(served.config, dtype=torch.float32)
        seen: list[set[str]] = []

        def look(*_: object) -> None:
            seen.append({name.rpartition(".")[0] for name, p in model.named_parameters() if not p.is_meta})

        with torch.no_grad(), layer_by_layer(model, Checkpoint(llama, served), torch.device("cpu")):
            for layer in model.model.layers:
                layer.self_attn.register_forward_pre_hook(look)
            model.base_model(torch.tensor([[1, 2, 3]]))
        assert len(seen) == 2
        for number, modules in enumerate(seen):
            assert modules and all(module.startswith(f"model.layers.{number}.") for module in modules)
        assert all(parameter.is_meta for parameter in model.parameters())

    def test_progress_counts_the_layers(self, llama: Path) -> None:
        done: list[tuple[int, int]] = []
        inspect_kv(llama, device="cpu", progress=lambda *counts: done.append(counts))
        assert done == [(1, 2), (2, 2)]


class TestVerdict:
    def test_ordinary_keys_may_stay_in_fp8(self, llama: Path) -> None:
        report = inspect_kv(llama, device="cpu")
        assert report.dtype == "fp8_e4m3" and report.verdict.endswith("all 2 layers: leave kv_cache.dtype at auto")

    def test_loud_keys_are_judged_with_scales_of_their_own(self, llama: Path) -> None:
        save_file(loud_weights(llama, seed=0), llama / "model.safetensors")
        report = inspect_kv(llama, device="cpu")
        assert report.dtype == "fp8_e4m3" and min(layer.scales.k for layer in report.layers) > 1

    def test_keys_that_no_scale_saves_need_bf16(self, llama: Path) -> None:
        save_file(uneven_weights(llama, seed=0), llama / "model.safetensors")
        report = inspect_kv(llama, device="cpu")
        assert report.dtype == "bfloat16" and "Set kv_cache.dtype: bfloat16" in report.verdict
        assert all("k_channel_relative" in layer.unfit and layer.name in report.verdict for layer in report.layers)


class TestRefusals:
    def test_a_tensor_that_is_missing_is_named(self, llama: Path) -> None:
        weights = load_file(llama / "model.safetensors")
        del weights["model.layers.1.self_attn.k_proj.weight"]
        save_file(weights, llama / "model.safetensors")
        with pytest.raises(InvalidManifest, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
            inspect_kv(llama, device="cpu")

    def test_a_layer_of_zeros_is_named(self, llama: Path) -> None:
        weights = load_file(llama / "model.safetensors")
        weights["model.layers.1.self_attn.v_proj.weight"].zero_()
        save_file(weights, llama / "model.safetensors")
        with pytest.raises(InvalidRequest, match=r"zero throughout.*model\.layers\.1\.self_attn\.v"):
            inspect_kv(llama, device="cpu")

    def test_latent_attention_has_no_keys_to_measure(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="latent attention"):
            inspect_kv(make_model(tmp_path, "deepseek_v3"), device="cpu")

    def test_a_family_whose_parts_are_not_known_is_refused(self, tmp_path: Path) -> None:
        Olmo2Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
        with pytest.raises(
            InvalidRequest, match=r"family olmo2; .* measured for llama, .*: with kv_cache\.dtype: auto"
        ):
            inspect_kv(tmp_path, device="cpu")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
    def test_a_gpu_that_is_not_there_is_said(self, llama: Path) -> None:
        with pytest.raises(InvalidRequest, match="torch sees no GPU"):
            inspect_kv(llama, device="cuda")


class TestCommand:
    def test_it_prints_each_layer_the_limits_and_the_verdict(self, llama: Path) -> None:
        console = Console(file=io.StringIO(), width=80)
        print_kv_report(inspect_kv(llama, device="cpu"), console)
        assert isinstance(console.file, io.StringIO)
        lines = [line.split() for line in console.file.getvalue().splitlines()]
        assert [line[0] for line in lines if len(line) == 8 and line[3].endswith("%")] == ["0", "1"]
        assert ["limit", "10%", "10%", "25%", "25%", "0.5"] in lines
        assert max(map(len, console.file.getvalue().splitlines()[:-1])) <= 80

    def test_it_gives_the_same_as_json(self, llama: Path) -> None:
        result = run(llama / "config.json", "--fp8-kv", "--device", "cpu", "--json")
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert report == inspect_kv(llama, device="cpu").model_dump(mode="json")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--fp8-kv", "--tp", "2"), "leave them out"),
            (("--fp8-kv", "--skip", "*.o_proj"), "leave them out"),
            (("--device", "cpu"), "say how --fp8-kv measures"),
            (("--prompts", "prompts.jsonl"), "say how --fp8-kv measures"),
            (("--fp8-kv", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
    )
    def test_options_that_do_not_go_together_are_refused(
        self, llama: Path, options: tuple[str, ...], words: str
    ) -> None:
        result = run(llama, *options)
        assert result.exit_code == 1 and result.stdout == "" and words in result.stderr

    def test_without_weights_it_says_what_is_missing(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        result = run(llama, "--fp8-kv")
        assert result.exit_code == 1 and "*.safetensors" in result.stderr


def test_scales_of_the_first_pass_are_those_of_a_pass_before(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        with observe_qkv(model) as before:
            model(ids)
        with observe_qkv(model, measured_with=before.scales("m")) as known:
            model(ids)
        with observe_qkv(model, measured_with=ScaledFrom()) as at_once:
            model(ids)
    assert at_once.errors() == known.errors()
