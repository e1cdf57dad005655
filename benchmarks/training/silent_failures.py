"""How soon the service names a version whose weights are wrong, when every call of the trainer has succeeded.

    python -m benchmarks.training.silent_failures                                      digits, on a CPU
    python -m benchmarks.training.silent_failures --task addition --model MODEL        a mixture, on a GPU

Trains as ``benchmarks.training.tis_ablation`` does, with GRPO and token-level TIS. After ``--healthy`` steps each push
sends other weights than the trainer has. The service takes them: each tensor has its name, dtype and shape. Counts
steps, rollouts and tokens until ``GET /v1/weights/{version}`` lists a suspect row, which is when the alert fires.
``--task addition`` needs the model that ``tis_ablation --task addition --prepare`` makes.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import laid_over
from benchmarks.common.marked import markdown_table, write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.common.processes import raise_at_sigterm
from benchmarks.training.tasks import Setup
from benchmarks.training.tis_ablation import ADDITION_MODEL, setup_of
from examples import grpo
from rollout_service.client import SyncRolloutClient
from rollout_service.local import running_service

RESULT = "training_silent_failures"
PAGE = PROJECT / "docs/mismatch.md"
PART = "python -m benchmarks.training.silent_failures --report"
Tensors = dict[str, torch.Tensor]
Spoil = Callable[[Tensors, Tensors], Tensors]
"""Makes a push wrong: the trainer's weights, and those before training → what is sent."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def with_an_old_layer(new: Tensors, old: Tensors) -> Tensors:
    """Return the new weights, but the middle layer's old ones."""
    layers = {int(found[1]) for name in new if (found := _LAYER.search(name))}
    stale = f".layers.{sorted(layers)[len(layers) // 2]}."
    return {name: old[name] if stale in name else tensor for name, tensor in new.items()}


def with_rotated_experts(new: Tensors, old: Tensors) -> Tensors:
    """Return the new weights, but in each layer expert i + 1 in the place of expert i. Routers are as they are."""
    return {name: tensor.roll(-1, 0) if ".experts." in name else tensor for name, tensor in new.items()}


def with_nothing_new(new: Tensors, old: Tensors) -> Tensors:
    """Return the old weights: pushes succeed, and nothing arrives."""
    return old


FAILURES: dict[str, tuple[str, Spoil]] = {
    "none": ("nothing is wrong", lambda new, _: new),
    "layer": ("one layer has the weights from before training", with_an_old_layer),
    "experts": ("experts in another order", with_rotated_experts),
    "nothing": ("nothing arrives", with_nothing_new),
}


class FailureOptions(Options):
    """What is measured."""

    task: Literal["digits", "addition"] = "digits"
    """See tis_ablation."""
    model: Path = ADDITION_MODEL
    """Of the task addition."""
    failures: tuple[str, ...] = tuple(FAILURES)
    """Which; experts needs a mixture."""
    healthy: int = 8
    """Steps before the first wrong push."""
    steps: int = 24
    """Steps in all; a failure that nobody has noticed by then is reported as such."""
    report: bool = False
    """Measure nothing: write the table of docs/mismatch.md from the results of all machines."""


def main(options: FailureOptions) -> None:
    """Train with each failure in turn, and write its case; or report."""
    raise_at_sigterm()
    disable_progress_bar()
    if options.report:
        machines = sorted(file.parent.name for file in RESULTS.glob(f"*/{RESULT}.json"))
        write_part(PAGE, PART, table([case for name in machines for case in results.cases(RESULT, machine_name=name)]))
        return
    if unknown := set(options.failures) - set(FAILURES):
        raise typer.BadParameter(f"--failures {', '.join(sorted(unknown))}: there are {', '.join(FAILURES)}")
    with tempfile.TemporaryDirectory(prefix="silent-failures-") as folder:
        setup = setup_of(options.task, Path(folder), options.model)
        measure_each(options, setup, Path(folder) / "log")


def measure_each(options: FailureOptions, setup: Setup, log: Path) -> None:
    """Start one service, with its log at ``log``, and measure each failure in turn."""
    settings = laid_over(setup.sections, {"weights": {"root": log}})
    with running_service(setup.deployment, settings) as service, SyncRolloutClient(service.url) as client:
        raise_at_sigterm()  # again: ray.init puts a handler of its own there
        for name in options.failures:
            model = setup.start(service.config.model.path, 0)
            if name == "experts" and not any(".experts." in tensor for tensor in model.state_dict()):
                print("experts: left out, the model has none", flush=True)
                continue
            case = measure(client, setup, model, service.config.model.path, name, options)
            results.add(RESULT, [case], ("task", "failure"))


def measure(
    client: SyncRolloutClient, setup: Setup, model: PreTrainedModel, path: Path, name: str, options: FailureOptions
) -> dict[str, Any]:
    """Train until the failure is noticed, or all steps are made; return the case."""
    before = {tensor: value.clone() for tensor, value in grpo.in_bf16(model).items()}
    pushes = 0

    def pushed(trained: PreTrainedModel) -> Tensors:
        nonlocal pushes
        pushes += 1  # the first is of the weights before training
        new = grpo.in_bf16(trained)
        return FAILURES[name][1](new, before) if pushes > options.healthy else new

    case: dict[str, Any] = {
        "task": options.task,
        "failure": name,
        "healthy": options.healthy,
        "noticed": False,
        "false_alarms": 0,
    }
    wrong: dict[str, int] = {"steps": 0, "rollouts": 0, "tokens": 0}
    curve: list[dict[str, float]] = []
    with setup.policy(model) as policy:
        tokenizer = AutoTokenizer.from_pretrained(path)
        training = grpo.train(client, model, tokenizer, options.steps, 0, task=setup.task, pushed=pushed, policy=policy)
        for number, step in enumerate(training, 1):
            suspect = bool(client.weights(step.version).suspect)
            row = next(row for row in client.mismatch(version=step.version).versions)
            curve.append({"step": number, "k3": row.k3, "prob_error": row.prob_error, "suspect": suspect})
            print(f"{name}: {curve[-1]}", flush=True)
            if number <= options.healthy or name == "none":
                case["false_alarms"] += suspect
                continue
            wrong["steps"] += 1
            wrong["rollouts"] += step.batch.mask.shape[0]
            wrong["tokens"] += int(step.batch.mask.sum())
            if suspect:
                case["noticed"] = True
                break
    return {**case, **wrong, "curve": curve}


def table(cases: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = []
    for case in cases:
        curve, healthy = case["curve"], case["healthy"]
        right = max(each["k3"] for each in curve[:healthy])
        last = curve[-1]["k3"]
        after = f"{case['steps']} step(s)" if case["noticed"] else f"not in {case['steps']} steps"
        if case["failure"] == "none":
            after = f"{case['false_alarms']} false alarms in {len(curve)} steps"
        counts = [str(case[name]) if case["noticed"] else "–" for name in ("rollouts", "tokens")]
        rows.append([FAILURES[case["failure"]][0], case["task"], after, *counts, f"{right:.1e}, {last:.1e}"])
    heading = ("weights that were pushed", "task", "noticed after", "rollouts", "tokens", "k3: before, then")
    return markdown_table(heading, rows)


if __name__ == "__main__":
    run(main)
