"""The addition task, its tokens, and the accounts of a trainer's steps."""

import itertools
import json
import os
import select
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.common import results
from benchmarks.common.processes import process
from benchmarks.trainers import pretraining, sides, trl, verl
from benchmarks.trainers.addition import MAX_TOKENS, Problem, problems, reward
from benchmarks.trainers.trl_training import Steps

SOME = list(itertools.islice(problems(7), 64))
CARRIES = Problem((2427, 2229, 5))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEP = {"sync_s": 0.5, "rollout_s": 1.0, "train_s": 0.5, "step_s": 2.0, "tokens_per_s": 100.0}
LINE = {"step": 1, **STEP, "k3": 1e-4, "probability_error": 1e-3, "logprob_difference": 1e-2, "reward": 0.25}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "_qwen3_template", lambda: TEMPLATE)
        return pretraining.make_tokenizer()


def test_an_answer_writes_each_column_with_its_carry() -> None:
    assert CARRIES.question == "a=2427 b=2229 c=0005\nWhat is a+b+c?"
    assert CARRIES.answer == (
        "<think>\nb 2427+2229 7+9+0=16 2+2+1=05 4+2+0=06 2+2+0=04 4656\n"
        "c 4656+0005 6+5+0=11 5+0+1=06 6+0+0=06 4+0+0=04 4661\n</think>\n\n4661"
    )


def test_each_right_answer_is_rewarded_and_no_other() -> None:
    assert {reward(problem.answer, problem.total) for problem in SOME} == {1.0}
    assert {reward(problem.answer, problem.total + 1) for problem in SOME} == {0.0}
    assert reward(CARRIES.answer.removesuffix("4661"), 4661) == 0.0
    assert reward("", 4661) == 0.0


def test_labels_are_the_answer_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = pretraining.Batch.of(tokenizer, SOME)
    asked = batch.labels == -100
    for problem, tokens, labels, skipped in zip(SOME, batch.tokens, batch.labels, asked, strict=True):
        assert tokenizer.decode(labels[~skipped]) == f"{problem.answer}<|im_end|>"
        assert tokenizer.decode(labels[~skipped], skip_special_tokens=True) == problem.answer
        assert tokens[~skipped].equal(labels[~skipped])
    assert (~asked).sum(1).max() <= MAX_TOKENS
    assert batch.tokens.max() < pretraining.VOCABULARY == len(tokenizer)


def test_pretraining_stops_at_the_target(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = iter([0.0, 0.1, 0.9])
    monkeypatch.setattr(pretraining, "_probability", lambda model, batch: next(reached))
    monkeypatch.setattr(pretraining, "_BATCH", 1)
    monkeypatch.setattr(pretraining, "_EVERY", 1)
    monkeypatch.setitem(pretraining.SHAPES, "tiny", pretraining.SHAPES["tiny"] | {"num_hidden_layers": 1})
    model = pretraining.make_model("tiny", tokenizer)
    found = pretraining.pretrain(model, tokenizer, target=0.35, limit_s=1e9, device=torch.device("cpu"))
    assert (found["steps"], found["right"]) == (3, 0.1), "the check before the last is nearer to the target"


class Generation:
    """TRL's, as far as steps are measured around it."""

    def sync_weights(self) -> None: ...

    def generate(self) -> tuple[list[list[int]], list[list[int]], None, None]:
        return [[1]], [[1, 2, 3], [4, 5]], None, None


def test_a_step_is_written_with_its_mismatch_and_tokens() -> None:
    lines = list[dict[str, float]]()
    trainer = SimpleNamespace(vllm_generation=Generation(), compute_loss=lambda model, inputs: inputs)
    steps = Steps(trainer, lines.append)
    steps.on_step_begin()
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.generate()
    logprobs = torch.tensor([[-1.0, -2.0, -9.0]])
    inputs = {
        "old_per_token_logps": logprobs,
        "sampling_per_token_logps": logprobs + torch.tensor([[0.1, 0.0, 5.0]]),
        "completion_mask": torch.tensor([[1, 1, 0]]),
    }
    assert trainer.compute_loss(None, inputs) is inputs
    steps.on_step_end()
    logs = {"reward": 0.5, "sampling/sampling_logp_difference/mean": 0.05}
    steps.on_log(None, SimpleNamespace(global_step=1), None, logs)
    steps.on_log(None, SimpleNamespace(global_step=1), None, {"train_runtime": 1.0})
    (line,) = lines
    assert (line["step"], line["tokens"], line["reward"], line["logprob_difference"]) == (1, 5, 0.5, 0.05)
    assert line["k3"] == pytest.approx((torch.tensor(-0.1).exp() - 1 + 0.1).item() / 2, rel=1e-4)
    assert line["probability_error"] == pytest.approx((torch.tensor([-0.9, -1.0]).exp()).diff().abs().item() / 2)
    assert line["train_s"] == pytest.approx(line["step_s"] - line["sync_s"] - line["rollout_s"])


def test_half_a_line_is_no_step_yet(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text(json.dumps(LINE) + "\n" + '{"step": 2')
    assert sides.read_steps(tmp_path / "steps") == [LINE]
    assert sides.read_steps(tmp_path / "none") == []


def test_medians_leave_out_the_first_steps() -> None:
    lines = [LINE | {"step": step, "step_s": 9.0 if step <= sides.WARM_UP else 2.0} for step in range(1, 9)]
    found = sides.summarize(lines)
    assert (found["steps"], found["median_step_s"], found["first_reward"]) == (8, 2.0, 0.25)
    assert sides.summarize(lines[:1])["median_step_s"] == 9.0
    assert sides.summarize([]) == {"steps": 0}


def test_each_side_has_its_own_server_and_the_same_trainer(tmp_path: Path) -> None:
    asked = trl.TrlOptions(folder=tmp_path)
    assert trl.server_command("ours", asked)[3:] == ["serve", str(tmp_path), "--replicas", "1", "--port", "8000"]
    own = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", str(tmp_path), "--port", "8000"]
    assert trl.server_command("own", asked) == own
    assert trl.server_command("own-fp8", asked) == [*own, "--quantization", "fp8"]


def test_verl_has_the_engine_and_its_gpu_or_the_service(tmp_path: Path) -> None:
    asked = verl.VerlOptions(folder=tmp_path, out=tmp_path, set=("data.seed=1",))
    (tmp_path / "questions.parquet").touch()
    ours, own, fp8 = (verl.processes(asked, side, verl.Training()) for side in ("ours", "own", "own-fp8"))
    assert (ours.server, own.server) == (trl.server_command("ours", trl.TrlOptions(folder=tmp_path)), None)
    differing = {option for option in ours.command if option not in own.command}
    assert differing == {
        "actor_rollout_ref.rollout.name=rollout_service",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout_service",
        "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollout_service.url=http://127.0.0.1:8000",
    }
    assert set(fp8.command) - set(own.command) == {"actor_rollout_ref.rollout.quantization=fp8"}
    assert ours.command[-1] == own.command[-1] == "data.seed=1"


def test_a_step_is_read_from_verl_s_log() -> None:
    data = dict.fromkeys(verl.FROM_VERL.values(), 0.25)
    data |= {"timing_s/step": 2.0, "timing_s/update_weights": 0.5, "response_length/mean": 100.0, "other": 1.0}
    line = verl.step_of({"step": 3, "data": data}, completions=8)
    assert (line["step"], line["train_s"], line["tokens"], line["tokens_per_s"]) == (3.0, 1.25, 800, 3200.0)
    assert sides.summarize([line])["last_reward"] == 0.25
    with pytest.raises(KeyError, match="timing_s/gen"):
        verl.step_of({"step": 3, "data": {"timing_s/step": 2.0, "timing_s/update_weights": 0.5}}, completions=8)


HEALTHY = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
ONE_STEP = "import sys; open('steps.jsonl', 'w').write(sys.argv[1] + chr(10))"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sides.SideOptions:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(sides, "gpus", list)
    (tmp_path / "pretraining.json").write_text('{"shape": "0.2b", "steps": 1, "seconds": 1.0, "right": 0.3}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return sides.SideOptions(folder=tmp_path, port=free.getsockname()[1])


def test_a_side_is_measured_once_its_server_answers(asked: sides.SideOptions, tmp_path: Path) -> None:
    server, trainer = ([sys.executable, "-c", code] for code in (HEALTHY, ONE_STEP))
    commands = [*server, str(asked.port)], [*trainer, json.dumps(LINE)]
    sides.measure(asked, sides.Run("verl", "own", "trainers", {}, tmp_path / "run", *commands, is_server_first=True))
    (case,) = results.cases("trainers")
    assert (case["ended"], case["steps"], case["curves"]["reward"]) == ("all steps were made", 1, [0.25])
    assert case["start"].keys() == {"server_s", "first_step_s"}


def test_a_trainer_without_a_step_is_an_error(asked: sides.SideOptions, tmp_path: Path) -> None:
    trainer = [sys.executable, "-c", "raise SystemExit(3)"]
    run = sides.Run("verl", "own", "trainers", {}, tmp_path / "run", None, trainer, is_server_first=True)
    with pytest.raises(RuntimeError, match="own: 0 steps: the trainer ended with status 3"):
        sides.measure(asked, run)
    assert results.cases("trainers") == []


def test_a_process_ends_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with process([sys.executable, "-c", code], log, folder=tmp_path, environment={}, grace_s=60) as started:
        while not (said := log.read_text()).endswith("\n"):
            assert started.poll() is None
        sleeping = os.pidfd_open(int(said))
    assert started.returncode is not None
    assert select.select([sleeping], [], [], 60)[0] == [sleeping]
    os.close(sleeping)
