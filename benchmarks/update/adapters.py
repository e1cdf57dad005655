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
import multiprocessing
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

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
from benchmarks.common.work import random_prompts
from benchmarks.rollout.fleet import GROUP, RolloutOptions, measured_rate, rate_of_groups
from benchmarks.update.busy import OUTPUT_TOKENS, PROMPT_TOKENS, busy
from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapters import LoadedAdapter
from rollout_service.local import metrics_targets
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.adapters import CONFIG_FILE, TENSORS_FILE, AdapterVersion
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.sampling import Sampling

RESULT = "update_adapters"
SAME = ("model", "case", "replicas", "tensor_parallel", "gpu_share", "rank", "dtype", "rollouts", "output_tokens")
"""Fields in which two cases agree that measured the same."""
TINY = {"rollouts": 64, "prompt_tokens": 64, "output_tokens": 64, "repeats": 1, "repeated": 320, "streams": 4}
"""Sizes for the tiny model."""
PUSHED = "run-0"
QUIET_S = 3.0
"""Time in seconds under load before the first push."""
EXPORTED_S, COUNTED_S = 12.0, 60.0
"""Seconds after which Ray, which exports counters every 10 s, has exported them; and the longest wait for it."""
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
    rank: Literal[8, 16, 32, 64, 128] = 32
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the adapters' tensors. PEFT trains in float32 unless autocast_adapter_dtype is False."""
    pushes: int = 7
    """By each transport."""
    streams: int = 16
    """Under way while versions are pushed; half of them name the adapter."""
    repeated: int = 8192
    """Tokens of the prompts that are looked up again."""
    live: tuple[int, ...] = (0, 1, 8)
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
            "engine": {"adapters": {"max_live": max(self.live) + 2, "max_rank": self.rank}},
            "weights": {"source_roots": [str(self.saved)]},
        }


class Adapter:
    """Random matrices for every linear layer of a model, a little different in each version."""

    def __init__(self, model: Path, asked: AdapterOptions) -> None:
        device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        dtype: torch.dtype = getattr(torch, asked.dtype)
        linears = {name: shape for name, shape in ServedModel.load(model).linears.items() if ".experts." not in name}
        self.tensors: Weights = {}
        for name, (outputs, inputs) in linears.items():
            a = torch.randn(asked.rank, inputs, device=device) * inputs**-0.5
            b = torch.randn(outputs, asked.rank, device=device) * 1e-3
            self.tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            self.tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": asked.rank,
            "lora_alpha": 2 * asked.rank,
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
        """Write PEFT's files."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in self.tensors.items()}, folder / TENSORS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config))


Silence = tuple[float, float]
"""When a stream's tokens came, and the time in seconds since those before; by the machine's monotonic clock."""


@contextmanager
def streams(url: str, concurrent: int) -> Iterator[list[Silence]]:
    """Keep so many streams open from a process of its own until the block ends. Half of them name the adapter.

    The list has the silences once the block has ended. Raises EOFError if the process died.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_stream, args=(there, url, concurrent), daemon=True)
    child.start()
    there.close()  # the child's end alone is open: its death ends ``recv``
    silences: list[Silence] = []
    try:
        here.recv()
        yield silences
        here.send(None)
        silences += here.recv()
    finally:
        child.terminate()
        child.join()


def _stream(parent: Connection, url: str, concurrent: int) -> None:
    silences: list[Silence] = []

    async def stream(client: RolloutClient, number: int) -> None:
        prompt, last = list(range(number + 10, number + 10 + PROMPT_TOKENS)), None
        adapter = PUSHED if number % 2 else None
        async with client.generate_stream(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, adapter=adapter) as pieces:
            async for _ in pieces:
                now = time.monotonic()
                if last is not None:
                    silences.append((now, now - last))
                last = now

    async def keep() -> None:
        async with RolloutClient(url) as client:
            await stream(client, 0)
            async with busy(concurrent, lambda number: stream(client, number)):
                parent.send(None)
                await asyncio.to_thread(parent.recv)

    asyncio.run(keep())
    parent.send(silences)


def longest(silences: list[Silence], begin: float, end: float) -> float:
    """Return the longest silence of any stream in a period of time, in seconds."""
    return round(max((gap for at, gap in silences if at > begin and at - gap < end), default=0.0), 4)


def updates(client: SyncRolloutClient) -> set[UpdateTimings | None]:
    """Return the timings of each replica's last weight update, for which it was closed."""
    return {replica.update for replica in client.fleet().replicas}


def pushed(
    url: str,
    client: SyncRolloutClient,
    asked: AdapterOptions,
    adapter: Adapter,
    push: Callable[[], object],
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Push versions under streams; return the seconds of each, and the longest silence of a stream meanwhile.

    ``prepare``: called before each push, and not timed with it.
    """
    before = updates(client)
    spans = list[tuple[float, float]]()
    with streams(url, asked.streams) as silences:
        began = time.monotonic()
        time.sleep(QUIET_S)
        for _ in range(asked.pushes):
            adapter.step()
            prepare()
            started = time.monotonic()
            push()
            spans.append((started, time.monotonic()))
            time.sleep(1.0)  # a trainer's step lasts longer
    closed = [update.closed_s for update in updates(client) - before if update is not None]
    seconds = [end - start for start, end in spans]
    newest = client.adapters()[-1]
    check = client.generate([11, 12, 13], max_tokens=4, adapter=PUSHED, min_adapter_version=newest.version)
    return {
        "push_s": seconds,
        "median_push_s": statistics.median(seconds),
        "engine_closed_s": sum(closed),
        "silence_s": [longest(silences, *span) for span in spans],
        "silence_without_push_s": longest(silences, began, began + QUIET_S),
        "nbytes": newest.nbytes,
        "version": newest.version,
        "served": all(span.adapter_version == newest.version for c in check.completions for span in c.spans),
    }


def repeated(url: str, client: SyncRolloutClient, asked: AdapterOptions, adapter: Adapter) -> dict[str, Any]:
    """Look prompts of the model and of an adapter up: first, again, and after a push of another adapter.

    Counts the tokens that the prefix caches had, by vLLM's counters. Nothing else may run.
    """
    adapter.push(client, "kept")
    is_tiny = asked.model == "tiny"
    prompt = [5 + i % 90 for i in range(asked.repeated)] if is_tiny else random_prompts([asked.repeated])[0]
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    agents = metrics_targets(url)[1:]
    ray.shutdown()
    asked_tokens, hits_before = _settled_counters(agents)
    found: dict[str, Any] = {"prompt_tokens": 2 * asked.repeated}
    for when in ("first", "again", "after_push"):
        if when == "after_push":
            adapter.step()
            adapter.push(client, PUSHED)
        started = time.monotonic()
        for name in (None, "kept"):
            client.generate(prompt, max_tokens=1, adapter=name, session_id="repeated")
        found[f"{when}_s"] = round(time.monotonic() - started, 4)
        asked_tokens += 2 * asked.repeated
        _, hits = _cache_counters(agents, asked_tokens)
        found[f"{when}_cached_tokens"] = int(hits - hits_before)
        hits_before = hits
    client.remove_adapter("kept")
    return found


def _settled_counters(agents: tuple[str, ...]) -> tuple[float, float]:
    """Return the counters of the prefix caches once Ray has exported all earlier requests."""
    before = _cache_counters(agents, 0)
    while True:
        time.sleep(EXPORTED_S)
        if (now := _cache_counters(agents, 0)) == before:
            return now
        before = now


def _cache_counters(agents: tuple[str, ...], at_least: float) -> tuple[float, float]:
    """Return the tokens that were looked up in the prefix caches, once they are ``at_least``, and those found."""
    deadline = time.monotonic() + COUNTED_S
    while True:
        queries = hits = 0.0
        for agent in agents:
            for family in text_string_to_metric_families(httpx.get(agent, timeout=60).raise_for_status().text):
                for sample in family.samples:
                    queries += sample.value if sample.name == "ray_vllm_prefix_cache_queries_total" else 0
                    hits += sample.value if sample.name == "ray_vllm_prefix_cache_hits_total" else 0
        if queries >= at_least:
            return queries, hits
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray exports {queries:.0f} looked up tokens, not {at_least:.0f}: are its metrics on?")
        time.sleep(1)


async def rate(url: str, asked: AdapterOptions, named: int) -> dict[str, Any]:
    """Return the tokens/s while rollouts name so many adapters in turn."""
    async with RolloutClient(url) as client:
        adapters = [f"run-{number}" for number in range(named)]
        return await measured_rate(client, asked, asked.replicas, adapters or [None])


async def measure_bare(asked: AdapterOptions, adapter: Adapter) -> None:
    """Measure the tokens/s of one engine without a service."""
    adapter.save(asked.saved)
    first = AdapterVersion(name="run", version=0, digest="", base_version=0, base_digest="", rank=asked.rank, nbytes=0)
    versions = [
        first.model_copy(update={"version": number, "digest": str(number)}) for number in range(max(asked.live))
    ]
    loaded = [LoadedAdapter(version, number, asked.saved) for number, version in enumerate(versions, start=1)]
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
    saved_s = list[float]()

    def load() -> None:
        body = {"lora_name": PUSHED, "lora_path": str(asked.saved)}
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=600).raise_for_status()

    def save() -> None:
        started = time.monotonic()
        adapter.save(asked.saved)
        saved_s.append(time.monotonic() - started)

    keep(asked, "folder", pushed(url, client, asked, adapter, load, save) | {"saved_s": saved_s})


def keep(asked: AdapterOptions, case: str, found: dict[str, Any]) -> None:
    """Add a case to the result."""
    sizes = asked.model_dump(mode="json", include={*SAME} - {"case"}) | {"case": case}
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
        adapter = Adapter(model, asked)
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
        asyncio.run(measure_bare(asked.model_copy(update={"replicas": 1}), Adapter(model, asked)))
    if Phase.TOKENS in asked.phase:
        with shipped_service(asked, str(asked.replicas)) as (url, start):
            keep(asked, "off", start | asyncio.run(rate(url, asked, 0)))


if __name__ == "__main__":
    run(main)
