"""GRPO on the CPU, with rollouts from the service: what ``make demo`` runs.

    make demo          or          python -m examples.grpo_digits --help

The service runs on this machine: Ray Serve, a vLLM engine with blockwise FP8 weights and FP8 KV cache, and the ingest
that quantizes what we push. The trainer is this process; it knows the service's address and nothing else. Its loop is
the tutorial in ``grpo``.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.digits_task import warm_start
from examples.grpo import train
from examples.report import Report, StepRecord
from rollout_service.client import SyncRolloutClient
from rollout_service.local import running_service


def main(
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=10)] = 40,
    seed: Annotated[int, typer.Option(help="Of the prompts and the warm start.")] = 0,
    config: Annotated[Path, typer.Option(help="Deployment to run.")] = Path("deployments/cpu_rollout.yaml"),
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.png.")] = Path("out/demo"),
) -> None:
    """Train a small model to write digits backwards, with rollouts from an FP8 service, and report how it went."""
    report = Report(out, steps)
    disable_progress_bar()  # transformers' own
    try:
        report.say("starting the service: Ray Serve, the ingest and a vLLM engine (about a minute)")
        with running_service(config, {"weights": {"root": out / "weights"}}) as service:
            report.say(f"the service answers at {service.url}")
            with SyncRolloutClient(service.url) as client:
                demonstrate(client, service.config.model.path, steps, seed, report)
    except KeyboardInterrupt:
        report.say("interrupted: the service is stopped")
        raise typer.Exit(130) from None
    raise typer.Exit(report.finish())


def demonstrate(client: SyncRolloutClient, model_path: Path, steps: int, seed: int, report: Report) -> None:
    """The whole training: warm start, then ``steps`` of GRPO."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    report.say("warm start: a short supervised phase, so that there is something to reinforce (under a minute)")
    report.say(f"warm start took {warm_start(model, tokenizer, seed)} supervised steps")

    with report.progress():
        began = time.perf_counter()
        for step in train(client, model, tokenizer, steps, seed):
            step_s = time.perf_counter() - began
            caches = [replica.kv_cache for replica in client.fleet().replicas]
            report.record(
                StepRecord(
                    version=step.version + 1,
                    reward=step.batch.mean_reward,
                    mismatch_k3=step.metrics["rollout_corr/k3_kl"],
                    tokens=int(step.batch.mask.sum()),
                    rollout_s=step.rollout_s,
                    update_s=step.update_s,
                    calibration_s=max((cache.measured_s or 0.0 for cache in caches if cache), default=0.0),
                    step_s=step_s,
                )
            )
            began = time.perf_counter()


if __name__ == "__main__":
    typer.run(main)
