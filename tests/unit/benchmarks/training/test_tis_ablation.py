"""The ablation's arms and options; no engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Typer
from typer.testing import CliRunner

from benchmarks.common.command import spread
from benchmarks.training.ablation_report import CURVES, PAIRS, STYLES, Run
from benchmarks.training.tis_ablation import (
    ARMS,
    PROJECT,
    SERVICES,
    accuracy,
    answers_of_trainer,
    kept_runs,
    main,
    parse_arms,
    settings_of,
)
from rollout_service.correction import preset
from rollout_service.local import load_config
from rollout_service.model.tiny import make_tiny_qwen3

app = Typer()
app.command()(spread(main))


def run(arm: str = "fp8", seed: int = 0, steps: int = 4) -> Run:
    return Run(arm, seed, settings_of(arm, steps), dict.fromkeys(CURVES, [0.5] * steps), 0.9, 0.8, 12.0)


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_a_configuration(service: str) -> None:
    config = load_config(PROJECT / "deployments/cpu_rollout.yaml", SERVICES[service])
    assert config.kv_cache.scales_policy == "unit"


def test_arms_come_in_their_own_order_however_they_are_named() -> None:
    assert parse_arms("coarse, bf16,,coarse") == ["bf16", "coarse"]


@pytest.mark.parametrize(("text", "complaint"), [("bf16,int4", "int4 is no arm; there are bf16,"), (" , ", "nothing")])
def test_an_arm_that_there_is_not_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_arms(text)


def test_arms_of_a_pair_differ_by_the_correction_only() -> None:
    for with_tis, without in PAIRS:
        one, other = ARMS[with_tis], ARMS[without]
        assert (one.correction, other.correction) == ("token_tis", "metrics_only")
        assert replace(one, correction=other.correction, title=other.title) == other


def test_every_arm_has_a_published_correction_and_a_style() -> None:
    assert ARMS.keys() == STYLES.keys()
    for arm in ARMS.values():
        preset(arm.correction)


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    for kept in (run("fp8", 1), run("coarse", 0)):
        kept.save(tmp_path)
    assert kept_runs(tmp_path, ["fp8", "coarse"], seeds=2, steps=4) == {
        ("fp8", 1): run("fp8", 1),
        ("coarse", 0): run("coarse"),
    }
    assert kept_runs(tmp_path, ["fp8"], seeds=1, steps=4) == {}


def test_a_run_with_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    run(steps=4).save(tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        kept_runs(tmp_path, ["fp8"], seeds=1, steps=5)


def test_an_ablation_does_not_overwrite_another(tmp_path: Path) -> None:
    run().save(tmp_path / "runs")
    refused = CliRunner().invoke(app, ["--out", str(tmp_path), "--steps", "4"])
    assert refused.exit_code == 2
    assert "--resume" in refused.output


def test_resuming_a_finished_ablation_needs_no_service(tmp_path: Path) -> None:
    for arm in ("fp8_tis", "fp8"):
        run(arm).save(tmp_path / "runs")
    options = ["--out", str(tmp_path), "--steps", "4", "--seeds", "1", "--arms", "fp8,fp8_tis", "--resume"]
    assert CliRunner().invoke(app, options, catch_exceptions=False).exit_code == 0
    assert "| FP8, TIS | 0.500 ± 0.000 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "tis_ablation.png").read_bytes().startswith(b"\x89PNG")


def test_the_trainer_answers_with_its_most_probable_tokens(
    tmp_path: Path,
) -> None:
    make_tiny_qwen3(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    questions = ["40917>", "12345>"]
    answers = answers_of_trainer(model, tokenizer, questions)
    for question, answer in zip(questions, answers, strict=True):
        tokens = torch.tensor(tokenizer([question])["input_ids"])
        made = model.generate(tokens, do_sample=False, max_new_tokens=5)[0, tokens.shape[1] :]
        assert answer == tokenizer.decode(made).partition(tokenizer.eos_token)[0]
    assert accuracy(questions, ["71904", "54"]) == pytest.approx((1.0 + 0.4) / 2)
