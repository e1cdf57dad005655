"""GRPO with rollouts from the service: what ``make demo`` runs.

    make demo          or          python -m examples.grpo_digits --help

The service runs on this machine: Ray Serve, a vLLM engine with blockwise FP8 weights and FP8 KV cache (BF16 on a
processor that vLLM has no FP8 cache for), and the ingest that quantizes what we push. Where the GPU stack is installed
the engine and the ingest share a GPU. The trainer is this process, on the CPU; it knows the service's address and
nothing else. Its loop is the tutorial in ``grpo``.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.as_engine import AsEngine
from examples.digits_task import warm_start
from examples.grpo import train
from examples.report import Report, StepRecord
from rollout_service.cli import checks, machine
from rollout_service.client import SyncRolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.local import ServiceNotStarted, load_config, running_service

DEPLOYMENT = Path("deployments/cpu_rollout.yaml")
"""For a machine without a GPU; on one, ``on_a_gpu`` says what is set otherwise."""


def main(
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=10)] = 40,
    seed: Annotated[int, typer.Option(help="Of the prompts and the warm start.")] = 0,
    config: Annotated[Path, typer.Option(help="Deployment to run.")] = DEPLOYMENT,
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.png.")] = Path("out/demo"),
    fp8_kv_cache: Annotated[bool, typer.Option(help="Where it can be; else the KV cache is BF16.")] = True,
    fake_quant: Annotated[
        bool,
        typer.Option(help="Compute the policy as the engines do, and train through their rounding. BF16 KV cache."),
    ] = False,
) -> None:
    """Train a small model to write digits backwards, with rollouts from an FP8 service, and report how it went."""
    report = Report(out, steps, fake_quant=fake_quant)
    disable_progress_bar()  # transformers' own
    sections: dict[str, dict[str, object]] = {"weights": {"root": out / "weights"}}
    if fake_quant or not fp8_kv_cache:
        sections["kv_cache"] = {"dtype": "bfloat16"}
    if config == DEPLOYMENT and machine.installed("vllm") is not None:
        sections = on_a_gpu(sections)
        if why_not := no_gpu(load_config(config, sections)):
            report.say("not started, since the GPU stack is installed, which has no engine for the CPU:")
            report.say("; ".join([*why_not, "on the CPU: STACK=cpu make demo"]))
            raise typer.Exit(1)
    try:
        report.say("starting the service: Ray Serve, the ingest and a vLLM engine (about a minute)")
        with running_service(config, sections) as service:
            report.say(f"the service answers at {service.url}")
            with SyncRolloutClient(service.url) as client:
                demonstrate(client, service.config.model.path, steps, seed, report, fake_quant)
    except KeyboardInterrupt:
        report.say("interrupted: the service is stopped")
        raise typer.Exit(130) from None
    except ServiceNotStarted as error:
        report.say(f"not started: {error}")
        raise typer.Exit(1) from None
    raise typer.Exit(report.finish())


def on_a_gpu(sections: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The same on a GPU that the engine shares with the ingest."""
    engine = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.2}
    weights = sections.get("weights", {}) | {"ingest_num_gpus": 0.1}
    return sections | {"engine": engine, "scaling": {"num_gpus": 0.9}, "weights": weights}


def no_gpu(config: ServiceConfig) -> list[str]:
    """Why the deployment cannot run on this machine's GPUs; empty: it can."""
    return [str(problem) for problem in checks.gpus(checks.Plan(config, "127.0.0.1", 0))]


def demonstrate(
    client: SyncRolloutClient, model_path: Path, steps: int, seed: int, report: Report, fake_quant: bool = False
) -> None:
    """The whole training: warm start, then ``steps`` of GRPO."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    chosen = [replica.kv_cache.choice for replica in client.fleet().replicas if replica.kv_cache is not None]
    report.fp8_kv_cache = {choice.dtype for choice in chosen} == {"fp8_e4m3"}
    for why in sorted({choice.why for choice in chosen if choice.dtype == "bfloat16"}):
        report.say(f"the KV cache is in BF16: {why}")
    report.say("warm start: a short supervised phase, so that there is something to reinforce (under a minute)")
    report.say(f"warm start took {warm_start(model, tokenizer, seed)} supervised steps")

    computed = AsEngine(model, client.recipe()) if fake_quant else nullcontext()
    with report.progress(), computed as policy:
        began = time.perf_counter()
        for step in train(client, model, tokenizer, steps, seed, policy=policy):
            step_s = time.perf_counter() - began
            report.record(
                StepRecord(
                    version=step.version + 1,
                    reward=step.batch.mean_reward,
                    mismatch_k3=step.metrics["rollout_corr/k3_kl"],
                    tokens=int(step.batch.mask.sum()),
                    rollout_s=step.rollout_s,
                    update_s=step.update_s,
                    step_s=step_s,
                )
            )
            began = time.perf_counter()


if __name__ == "__main__":
    typer.run(main)
