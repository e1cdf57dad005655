"""The ablation's arms, tasks and options; no engine."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer import Typer
from typer.testing import CliRunner

from benchmarks.common.command import spread
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.trainers import pretraining
from benchmarks.training.ablation_report import PAIRS, Run, RunFile
from benchmarks.training.tasks import GPU_DEPLOYMENT, Addition, Digits, accuracy, greedy_digits
from benchmarks.training.tis_ablation import (
    ARMS,
    SERVICES,
    kept_runs,
    laid_over,
    main,
    settings_of,
)
from examples import grpo
from examples.as_engine import InBf16
from rollout_service.local import load_config
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.protocol.rollout import Completion, Rollout, Span
from tests.support.ablation import END, STEP

app = Typer()
app.command()(spread(main))
DIGITS = Digits(Path("unused"), CPU_DEPLOYMENT)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}<|im_end|>"


def write(folder: Path, arm: str = "fp8", seed: int = 0, steps: int = 4, *, ended: bool = True) -> None:
    with RunFile(folder, Run(arm, seed, settings_of(arm, steps, DIGITS), {"machine": "here"})) as file:
        for _ in range(steps):
            file.write(STEP)
        if ended:
            file.write(END)


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Addition:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "_qwen3_template", lambda: TEMPLATE)
        tokenizer = pretraining.make_tokenizer()
    tokenizer.save_pretrained(folder)
    pretraining.make_model("tiny-moe", tokenizer).save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps({"numbers": [7, 12]}))
    return Addition(folder, 1e-5, prompts=2, completions=2, gpu_share=0.45, deployment=GPU_DEPLOYMENT)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("deployment", [CPU_DEPLOYMENT, GPU_DEPLOYMENT])
def test_each_service_is_a_configuration(service: str, deployment: Path, addition: Addition) -> None:
    config = load_config(deployment, laid_over(addition.sections, SERVICES[service]))
    assert config.model.path == addition.folder and config.scaling.max_replicas == 1
    assert (config.quant.weights == "none") == (service == "bf16")
    assert (config.kv_cache.dtype == "bfloat16") == (service != "fp8")
    digits = load_config(deployment, laid_over(DIGITS.sections, SERVICES[service]))
    assert digits.kv_cache.scales_policy == "unit"


@pytest.mark.parametrize("shape", ["moe", "0.2b"])
def test_shapes_divide_into_fp8_blocks(shape: str) -> None:
    sizes = pretraining.SHAPES[shape]
    found = {name: size for name, size in sizes.items() if name.endswith(("_size", "_dim"))}
    found["heads"] = sizes["num_attention_heads"] * sizes["head_dim"]
    assert {name: size % 128 for name, size in found.items()} == dict.fromkeys(found, 0)
    assert sizes.get("num_experts", 32) >= 32


def test_right_answers_to_prompts_are_rewarded(addition: Addition) -> None:
    task = addition.task
    prompts = task.make_prompts(random.Random(3), 8)
    for prompt in prompts:
        numbers = [int(each.partition("=")[2]) for each in prompt.partition("<|im_start|>")[2].split("\n")[0].split()]
        assert 7 <= len(numbers) <= 12
        assert task.reward(prompt, f"<think>\n</think>\n\n{sum(numbers):04}") == 1.0
        assert task.reward(prompt, f"<think>\n</think>\n\n{sum(numbers) + 1:04}") == 0.0
    assert prompts == task.make_prompts(random.Random(3), 8)


def test_a_step_trains_a_mixture_with_prompts_of_any_length(addition: Addition) -> None:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(addition.folder)
    model = addition.start(addition.folder, seed=0)

    def rollout(prompt: int, lengths: list[int]) -> Rollout:
        made = [
            Completion(
                index=index,
                token_ids=tuple(range(50, 50 + n)),
                logprobs=(-7.0,) * n,
                finish_reason="length" if n == 5 else "stop",
                spans=(Span(version=1, start=0, end=n, replica_id="r"),),
                text=str(index),
            )
            for index, n in enumerate(lengths)
        ]
        return Rollout(
            request_id="a", replica_id="r", prompt_token_ids=tuple(range(20, 20 + prompt)), completions=tuple(made)
        )

    task = replace(addition.task, reward=lambda prompt, text: float(text))
    batch = grpo.make_batch(task, ["", ""], [rollout(3, [5, 2]), rollout(6, [4, 4])], tokenizer)
    assert batch.mask.sum(1).tolist() == [5, 2, 4, 4] and batch.tokens.shape == (4, 10)
    assert batch.cut_off == 0.25
    assert batch.tokens[:, -7:][batch.mask].tolist() == [*range(50, 55), *range(50, 52), *range(50, 54), *range(50, 54)]
    with torch.no_grad():
        alone = InBf16(model).logits(batch.tokens[2:3], 10)[0].log_softmax(-1)  # tokens 6 to 9 are the completion
    with addition.policy(model) as policy:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = model.lm_head.weight.clone()
        logprobs, metrics = grpo.optimize(model, optimizer, batch, grpo.TIS, policy)
    expected = [alone[position - 1, batch.tokens[2, position]].item() for position in range(6, 10)]
    assert grpo.of_completions(logprobs, batch)[2].tolist() == pytest.approx(expected, abs=0.02)
    assert metrics["grad_norm"] > 0 and not torch.equal(before, model.lm_head.weight)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.grad is not None and experts.grad.abs().sum() > 0


def test_arms_of_a_pair_differ_by_one_thing_only() -> None:
    for one, other in PAIRS:
        if other != "bf16":
            assert replace(ARMS[one], correction="metrics_only", title=ARMS[other].title) == ARMS[other]


def test_only_finished_runs_are_kept(tmp_path: Path) -> None:
    write(tmp_path, "fp8", 1)
    write(tmp_path, "coarse", 0)
    write(tmp_path, "fp8", 0, ended=False)
    assert kept_runs(tmp_path, ["fp8", "coarse"], 2, 4, DIGITS).keys() == {("fp8", 1), ("coarse", 0)}


def test_a_run_with_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        kept_runs(tmp_path, ["fp8"], 1, 5, DIGITS)


def test_an_ablation_does_not_overwrite_another(tmp_path: Path) -> None:
    write(tmp_path / "runs")
    refused = CliRunner().invoke(app, ["--out", str(tmp_path), "--steps", "4"])
    assert refused.exit_code == 2
    assert "--resume" in refused.output


def test_resuming_a_finished_ablation_needs_no_service(tmp_path: Path) -> None:
    for arm in ("fp8_tis", "fp8"):
        write(tmp_path / "runs", arm)
    options = ["--out", str(tmp_path), "--steps", "4", "--seeds", "1", "--arms", "fp8,fp8_tis", "--resume"]
    assert CliRunner().invoke(app, options, catch_exceptions=False).exit_code == 0
    assert "|FP8, TIS|0.500 ± 0.000|" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "tis_ablation.png").read_bytes().startswith(b"\x89PNG")


def test_the_trainer_answers_with_its_most_probable_tokens(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    questions = ["40917>", "12345>"]
    answers = greedy_digits(model, tokenizer, questions)
    for question, answer in zip(questions, answers, strict=True):
        tokens = torch.tensor(tokenizer([question])["input_ids"])
        made = model.generate(tokens, do_sample=False, max_new_tokens=5)[0, tokens.shape[1] :]
        assert answer == tokenizer.decode(made).partition(tokenizer.eos_token)[0]
    assert accuracy(grpo.DIGITS, questions, ["71904", "54"]) == pytest.approx((1.0 + 0.4) / 2)
