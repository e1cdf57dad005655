"""What a LoRA adapter costs: pushes to all replicas under load, and tokens/s with adapters.

    python -m benchmarks.update.adapters [--phase push] [--phase tokens] [--phase bare]

Random weights of a published shape, the shipped settings with ``engine.adapters``, and adapters over all linear layers.
Each case is written to benchmarks/results/<machine>/update_adapters.json as soon as it is measured:

- phase ``push``: ``tensors`` and ``folder`` push versions under a few streams, by ``push_adapter`` and by vLLM's route;
  ``cache``, at the end, looks a prompt up again before and after a push;
- phase ``tokens``: tokens/s with adapters in the engine, while none, one or several are named, and without (``off``);
- phase ``bare``: the same with one vLLM engine without a service, with the same arguments and random weights.

With ``--model tiny`` it runs on a CPU, with the sizes of ``TINY``.
"""

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.engine import bare_engine
from benchmarks.common.processes import raise_at_sigterm
from benchmarks.common.shipped_service import shipped_arguments, shipped_service, wait_until_ready
from benchmarks.rollout.fleet import GROUP, RolloutOptions, measured_rate, rate_of_groups
from benchmarks.update.busy import rollouts
from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapters import LoadedAdapter
from rollout_service.local import metrics_targets
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.adapters import CONFIG_FILE, TENSORS_FILE, AdapterVersion
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.sampling import Sampling

RESULT = "update_adapters"
SAME = ("model", "case", "replicas", "tensor_parallel", "gpu_share", "rollouts", "output_tokens")
RANK, DTYPE = 32, torch.bfloat16
TINY = {"rollouts": 64, "prompt_tokens": 64, "output_tokens": 64, "repeats": 1, "repeated": 320, "streams": 4}
"""Sizes for the tiny model."""
PUSHED = "run-0"
QUIET_S = 3.0  # time in seconds under load before the first push
EXPORTED_S = 12.0  # after so long Ray, which exports counters every 10 s, has exported them
Weights = dict[str, torch.Tensor]


class Phase(StrEnum):
    """What is measured."""

    PUSH = "push"
    TOKENS = "tokens"
    BARE = "bare"


class AdapterOptions(RolloutOptions):
    """The service, its load, and the adapters."""

    phase: tuple[Phase, ...] = tuple(Phase)
    """May be repeated."""
    replicas: int = 2
    pushes: int = 7
    """By each transport."""
    streams: int = 16
    """Under way while versions are pushed; half of them name the adapter."""
    repeated: int = 8192
    """Tokens of the prompts that are looked up again."""
    live: tuple[int, ...] = (0, 8)
    """Numbers of adapters that rollouts name in the phases ``tokens`` and ``bare``. May be repeated."""
    repeats: int = 2

    @property
    def saved(self) -> Path:
        """Return the folder in which the adapter is saved for vLLM's route."""
        return self.folder / "adapter"

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the service's settings that differ from the shipped ones."""
        return {
            "engine": {"adapters": {"max_live": max(self.live) + 2, "max_rank": RANK}},
            "weights": {"source_roots": [str(self.saved)]},
        }


class Adapter:
    """Random matrices for every linear layer of a model, a little different in each version."""

    def __init__(self, model: Path) -> None:
        device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        linears = {name: shape for name, shape in ServedModel.load(model).linears.items() if ".experts." not in name}
        self.tensors: Weights = {}
        for name, (outputs, inputs) in linears.items():
            a = torch.randn(RANK, inputs, device=device) * inputs**-0.5
            b = torch.randn(outputs, RANK, device=device) * 1e-3
            self.tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(DTYPE)
            self.tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(DTYPE)
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": sorted({name.rpartition(".")[2] for name in linears}),
            "bias": "none",
        }

    def step(self) -> None:
        """Change all values, as an optimizer does."""
        for tensor in self.tensors.values():
            tensor.mul_(1.01)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def push(self, client: SyncRolloutClient, name: str) -> int:
        """Push the tensors as the next version, which all replicas hold afterwards; return its number."""
        return client.push_adapter(name, self.tensors, config=self.config).version

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in self.tensors.items()}, folder / TENSORS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config))


def updates(client: SyncRolloutClient) -> set[UpdateTimings | None]:
    """Return the timings of each replica's last weight update, for which it was closed."""
    return {replica.update for replica in client.fleet().replicas}


def pushed(
    url: str,
    client: SyncRolloutClient,
    asked: AdapterOptions,
    adapter: Adapter,
    push: Callable[[], object],
    *,
    from_folder: bool = False,
) -> dict[str, Any]:
    """Push versions under streams; return the seconds of each, and how long engines closed."""
    before, seconds = updates(client), list[float]()
    with rollouts(url, asked.streams, PUSHED):
        time.sleep(QUIET_S)
        for _ in range(asked.pushes):
            adapter.step()
            if from_folder:
                adapter.save(asked.saved)
            started = time.monotonic()
            push()
            seconds.append(time.monotonic() - started)
            time.sleep(1.0)  # a trainer's step lasts longer
    closed = [update.closed_s for update in updates(client) - before if update is not None]
    newest = client.adapters()[-1]
    check = client.generate([11, 12, 13], max_tokens=4, adapter=PUSHED, min_adapter_version=newest.version)
    return {
        "push_s": seconds,
        "median_push_s": statistics.median(seconds),
        "engine_closed_s": sum(closed),
        "nbytes": newest.nbytes,
        "served": all(span.adapter_version == newest.version for c in check.completions for span in c.spans),
    }


def repeated(url: str, client: SyncRolloutClient, asked: AdapterOptions, adapter: Adapter) -> dict[str, Any]:
    """Look prompts of the model and of an adapter up: first, again, and after a push of another adapter."""
    adapter.push(client, "kept")
    [prompt] = asked.prompts(1, asked.repeated)
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    agents = metrics_targets(url)[1:]
    ray.shutdown()
    hits_before = _cached_tokens(agents)
    found: dict[str, Any] = {"prompt_tokens": 2 * asked.repeated}
    for when in ("first", "again", "after_push"):
        if when == "after_push":
            adapter.step()
            adapter.push(client, PUSHED)
        started = time.monotonic()
        for name in (None, "kept"):
            client.generate(prompt, max_tokens=1, adapter=name, session_id="repeated")
        found[f"{when}_s"] = round(time.monotonic() - started, 4)
        hits = _cached_tokens(agents)
        found[f"{when}_cached_tokens"] = hits - hits_before
        hits_before = hits
    client.remove_adapter("kept")
    return found


def _cached_tokens(agents: tuple[str, ...]) -> int:
    """Return the number of tokens that were found in the prefix caches so far."""
    time.sleep(EXPORTED_S)
    families = [
        family
        for agent in agents
        for family in text_string_to_metric_families(httpx.get(agent, timeout=60).raise_for_status().text)
    ]
    samples = [sample for family in families for sample in family.samples]
    return int(sum(each.value for each in samples if each.name == "ray_vllm_prefix_cache_hits_total"))


async def rate(url: str, asked: AdapterOptions, named: int) -> dict[str, Any]:
    """Return the tokens/s while rollouts name so many adapters in turn."""
    async with RolloutClient(url) as client:
        adapters = [f"run-{number}" for number in range(named)]
        return await measured_rate(client, asked, asked.replicas, adapters or [None])


async def measure_bare(asked: AdapterOptions, adapter: Adapter) -> None:
    """Measure the tokens/s of one engine without a service."""
    adapter.save(asked.saved)
    about: dict[str, Any] = {"name": "run", "base_version": 0, "base_digest": "", "rank": RANK, "nbytes": 0}
    loaded = [
        LoadedAdapter(AdapterVersion(version=number, digest=str(number), **about), number + 1, asked.saved)
        for number in range(max(asked.live))
    ]
    arguments = shipped_arguments(asked, "1", **asked.sections)["applications"][0]["args"]
    if asked.model == "tiny":  # what a replica falls back to on CPUs that have no FP8 cache
        arguments["kv_cache"] = {"dtype": "bfloat16"}
    started = time.monotonic()
    async with bare_engine(ServiceConfig.model_validate(arguments)) as engine:
        start = {"start_s": round(time.monotonic() - started, 1)}
        await engine.label(0)  # no version: the weights are random
        for each in loaded:
            await engine.add_adapter(each)

        async def run_group(prompt: list[int], adapter: LoadedAdapter | None) -> int:
            how = Sampling(n=GROUP, max_tokens=asked.output_tokens, ignore_eos=True)
            made = await engine.generate(uuid.uuid4().hex, tuple(prompt), how, adapter=adapter)
            return sum(len(completion.token_ids) for completion in made)

        for named in asked.live:
            keep(
                asked,
                f"bare, {named} named",
                start | await rate_of_groups(run_group, asked, 1, loaded[:named] or [None]),
            )


def measure_pushes(url: str, client: SyncRolloutClient, asked: AdapterOptions, adapter: Adapter) -> None:
    """Push by each transport."""
    adapter.push(client, PUSHED)  # streams name it
    keep(asked, "tensors", pushed(url, client, asked, adapter, lambda: adapter.push(client, PUSHED)))

    def load() -> None:
        body = {"lora_name": PUSHED, "lora_path": str(asked.saved)}
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=600).raise_for_status()

    keep(asked, "folder", pushed(url, client, asked, adapter, load, from_folder=True))


def keep(asked: AdapterOptions, case: str, found: dict[str, Any]) -> None:
    """Add a case to the result."""
    sizes = asked.model_dump(mode="json", include={*SAME} - {"case"}) | {
        "case": case,
        "rank": RANK,
        "dtype": "bfloat16",
    }
    results.add(RESULT, [sizes | found], SAME)


def measure_service(asked: AdapterOptions, model: Path) -> None:
    """Measure the service with adapters."""
    with (
        shipped_service(asked, str(asked.replicas), **asked.sections) as (url, start),
        SyncRolloutClient(url) as client,
    ):
        wait_until_ready(client, asked.replicas)
        for name in {each.name for each in client.adapters()}:  # of an earlier run
            client.remove_adapter(name)
        adapter = Adapter(model)
        if Phase.PUSH in asked.phase:
            measure_pushes(url, client, asked, adapter)
        if Phase.TOKENS in asked.phase:
            for number in range(max(asked.live)):
                adapter.step()
                adapter.push(client, f"run-{number}")
            for named in asked.live:
                keep(asked, f"{named} named", start | asyncio.run(rate(url, asked, named)))
        if Phase.PUSH in asked.phase:
            keep(asked, "cache", repeated(url, client, asked, adapter))


def main(asked: AdapterOptions) -> None:
    """Measure the phases."""
    raise_at_sigterm()
    if asked.model == "tiny":
        asked = asked.model_copy(update=TINY)
    model = asked.model_folder()
    asked.saved.mkdir(exist_ok=True)
    if {Phase.PUSH, Phase.TOKENS} & {*asked.phase}:
        measure_service(asked, model)
    if Phase.BARE in asked.phase:
        asyncio.run(measure_bare(asked.model_copy(update={"replicas": 1}), Adapter(model)))
    if Phase.TOKENS in asked.phase:
        with shipped_service(asked, str(asked.replicas)) as (url, start):
            keep(asked, "off", start | asyncio.run(rate(url, asked, 0)))


if __name__ == "__main__":
    run(main)
