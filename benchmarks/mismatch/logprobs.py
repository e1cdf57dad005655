"""How far an engine's logprobs are from a trainer's of the same weights, by the arithmetic that both use.

    python -m benchmarks.mismatch.logprobs [--model qwen3] [--engine bf16 --engine fp8_block …]
    python -m benchmarks.mismatch.logprobs --report        the tables of docs/numerics.md, of all machines

Small models are trained on the spot to repeat what they have read, which takes attention. By name, ``qwen3_30b_a3b``
is two layers of that model's shapes with random weights. Each engine samples 128 sequences, and trainers with the
unquantized weights score the same tokens, by the formulas of ``rollout_service.correction``. A row's ``engine`` names
the engine, and after it the trainer where that is not one in fp32. Each row is written as soon as it is measured.

Trainers:

- fp32, without a name: what engines differ from the exact forward pass by;
- ``bf16 trainer``: as most train;
- ``engine_roundings trainer``, ``fake_quant trainer``: BF16, computed as the engine does (``rollout_service.quant``),
  its FP8 products on a Hopper's FP8 tensor cores, or in fp32; ``fp32 products``, ``bf16 products``: those there;
- ``routes replayed``: each token goes to the experts that the engine chose (``examples/routing_replay.py``); on a GPU.

Engines are named by what is quantized; ``fp32 lm_head`` is ``engine.lm_head: float32``, and scales of the FP8 KV cache
are 1 or a trainer's. CUDA's kernels are called one by one (``enforce_eager``), but for ``compiled``, which has vLLM's
own fusions, and ``not compiled``, which has CUDA graphs alone (``compilation_config.mode: 0``). Trainers learn from
their recipe which kernels to imitate. Several engines are started at once: nothing is timed.
"""

import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.common.marked import markdown_table, write_part
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json
from benchmarks.common.shapes import SHAPES, Shape
from examples.routing_replay import replayed
from rollout_service.config import ServiceConfig
from rollout_service.correction.metrics import mismatch_metrics
from rollout_service.correction.ratios import compare
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, PathSource, TrainerRecipe
from rollout_service.quant.engine_roundings import engine_roundings
from rollout_service.quant.fake_quant import Products, fake_quant
from rollout_service.quant.forwards import Forwards
from rollout_service.store.log import WeightLog
from tests.support.models import FAMILIES

PAGE, RESULT = PROJECT / "docs/numerics.md", "mismatch_logprobs"
MACHINES = ("cpu-2-cores", "h200")
NAMES = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_30b_a3b": "30B-A3B, 2 layers, random",
    "qwen2": "Qwen2",
    "llama": "Llama, Mistral",  # the same layers
}
SAME = ("model", "engine")
STEPS, PROMPTS, TOKENS = 300, 128, 48  # of training; with a completion each; sampled for each prompt
BATCH = 16  # sequences in a step of training, and in a forward pass
PERIOD, TRAINED_TOKENS, FIRST_TOKEN = 16, 64, 8
"""After so many tokens a sequence repeats itself; length of those trained on; ids below are special tokens."""
PROMPT_SEED, CALIBRATION_SEED = 10**6, 2 * 10**6
KV_CACHE_BYTES = 1 << 30
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Model(StrEnum):
    """``QWEN3_30B_A3B``: two layers of its shapes, with random weights; a GPU only."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    QWEN2 = "qwen2"
    LLAMA = "llama"
    QWEN3_30B_A3B = "qwen3_30b_a3b"


class Engine(StrEnum):
    """An engine's arithmetic; the last ones on a GPU only."""

    BF16 = "bf16"
    BF16_FP32_HEAD = "bf16, fp32 lm_head"
    INT8 = "int8_channel"
    FP8_CHANNEL = "fp8_channel"
    FP8 = "fp8_block"
    FP8_FP32_HEAD = "fp8_block, fp32 lm_head"
    FP8KV = "fp8_block, fp8 kv"
    FP8KV_MEASURED = "fp8_block, fp8 kv, measured scales"
    BF16_COMPILED = "bf16, compiled"
    FP8_COMPILED = "fp8_block, compiled"
    FP8_NOT_COMPILED = "fp8_block, not compiled"


class Trainer(StrEnum):
    """What a row is named by after its engine."""

    FP32 = ""
    BF16 = "bf16 trainer"
    AS_ENGINE = "engine_roundings trainer"
    FAKE_QUANT = "fake_quant trainer"
    FAKE_QUANT_IN_FP32 = "fake_quant trainer, fp32 products"
    FAKE_QUANT_IN_BF16 = "fake_quant trainer, bf16 products"


BF16_CACHE: dict[str, Any] = {"kv_cache": {"dtype": "bfloat16"}}
NOT_QUANTIZED: dict[str, Any] = BF16_CACHE | {"quant": {"weights": "none"}}
COMPILED: dict[str, Any] = {"enforce_eager": False, "cuda_graph_sizes": [8]}
ON_A_GPU = (Engine.BF16_COMPILED, Engine.FP8_COMPILED, Engine.FP8_NOT_COMPILED)
SECTIONS: dict[Engine, dict[str, dict[str, Any]]] = {
    Engine.BF16: NOT_QUANTIZED,
    Engine.BF16_FP32_HEAD: NOT_QUANTIZED | {"engine": {"lm_head": "float32"}},
    Engine.INT8: BF16_CACHE | {"quant": {"weights": "int8_channel"}},
    Engine.FP8_CHANNEL: BF16_CACHE | {"quant": {"weights": "fp8_channel"}},
    Engine.FP8: BF16_CACHE,
    Engine.FP8_FP32_HEAD: BF16_CACHE | {"engine": {"lm_head": "float32"}},
    Engine.FP8KV: {"kv_cache": {"dtype": "fp8_e4m3"}},
    Engine.FP8KV_MEASURED: {"kv_cache": {"dtype": "fp8_e4m3"}},
    Engine.BF16_COMPILED: NOT_QUANTIZED | {"engine": COMPILED},
    Engine.FP8_COMPILED: BF16_CACHE | {"engine": COMPILED},
    Engine.FP8_NOT_COMPILED: BF16_CACHE | {"engine": COMPILED | {"extra": {"compilation_config": {"mode": 0}}}},
}
TRAINERS: dict[Engine, tuple[Trainer, ...]] = {  # of engines that are not here, the one in fp32 alone
    Engine.BF16: (Trainer.FP32, Trainer.BF16, Trainer.AS_ENGINE),
    Engine.BF16_FP32_HEAD: (Trainer.FP32, Trainer.BF16, Trainer.AS_ENGINE),
    Engine.FP8_FP32_HEAD: (Trainer.FP32, Trainer.FAKE_QUANT),
    Engine.FP8: (
        Trainer.FP32, Trainer.BF16, Trainer.FAKE_QUANT, Trainer.FAKE_QUANT_IN_FP32, Trainer.FAKE_QUANT_IN_BF16,
    ),
    Engine.FP8KV: (Trainer.FP32, Trainer.FAKE_QUANT),
    Engine.BF16_COMPILED: (Trainer.FP32, Trainer.AS_ENGINE),
    Engine.FP8_COMPILED: (Trainer.FP32, Trainer.FAKE_QUANT),
    Engine.FP8_NOT_COMPILED: (Trainer.FP32, Trainer.FAKE_QUANT),
}  # fmt: skip
REPLAYED: dict[Engine, tuple[Trainer, ...]] = {  # those that also replay the engine's experts
    Engine.BF16: (Trainer.FP32, Trainer.BF16, Trainer.AS_ENGINE),
    Engine.FP8: (Trainer.BF16, Trainer.FAKE_QUANT),
    Engine.BF16_COMPILED: (Trainer.AS_ENGINE,),
    Engine.FP8_COMPILED: (Trainer.FAKE_QUANT,),
}
OTHER_PRODUCTS: dict[Trainer, Products] = {Trainer.FAKE_QUANT_IN_FP32: "fp32", Trainer.FAKE_QUANT_IN_BF16: "bf16"}
MIXTURES = (Model.QWEN3_MOE, Model.QWEN3_30B_A3B)


class SampleOptions(Options):
    """Models and engines."""

    model: tuple[Model, ...] = (Model.QWEN3, Model.QWEN3_MOE)
    """May be repeated; of qwen3_30b_a3b, ``bf16`` and ``fp8_block`` and both compiled are what is wanted."""
    engine: tuple[Engine, ...] = tuple(each for each in Engine if GPU or each not in ON_A_GPU)
    """May be repeated; all that this machine has."""
    jobs: int = 6 if GPU else 1
    """Engines at once."""
    report: bool = False
    """Measure nothing: write the tables of docs/numerics.md."""


Sampled = list[tuple[list[int], Completion]]  # prompts and completions


def mismatch(model: str, engine: str, scored: torch.Tensor, sampled: torch.Tensor) -> Json:
    """Return a case from logprobs [completions, tokens] of the same tokens: the trainer's, and the engine's."""
    metrics = mismatch_metrics(compare(scored, sampled, torch.ones_like(sampled, dtype=torch.bool)))
    return {
        "model": model,
        "engine": engine,
        "tokens": sampled.numel(),
        "k1": metrics["kl"],
        "k3": metrics["k3_kl"],
        "prob_error": metrics["token_mult_prob_error"],
        "abs_diff_mean": metrics["rollout_train_logprobs_abs_diff_mean"],
        "abs_diff_max": metrics["rollout_train_logprobs_abs_diff_max"],
        "nll": metrics["training_log_ppl"],
    }


def score(model: PreTrainedModel, sampled: Sampled, *, replay: bool = False) -> torch.Tensor:
    """Logprobs of the completions' tokens [completions, tokens]; all prompts and all completions of one length."""
    tokens = torch.tensor([[*prompt, *completion.token_ids] for prompt, completion in sampled])
    first, found = len(sampled[0][0]), []
    for start in range(0, len(tokens), BATCH):
        rows = tokens[start : start + BATCH].to(model.device)
        with torch.no_grad(), routes(model, sampled[start : start + BATCH]) if replay else nullcontext():
            logits = model(rows).logits[:, first - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, rows[:, first:, None])[..., 0].cpu())
    return torch.cat(found)


@contextmanager
def routes(model: PreTrainedModel, sampled: Sampled) -> Iterator[None]:
    """The model sends these prompts and completions to the engine's experts."""
    told = [
        completion.routed_experts.unpacked(len(prompt) + len(completion.token_ids))
        for prompt, completion in sampled
        if completion.routed_experts is not None
    ]
    experts = torch.stack([torch.from_numpy(of_tokens.astype("int64")) for of_tokens, _ in told])
    with replayed(model, experts, torch.stack([torch.from_numpy(known) for _, known in told])):
        yield


def measured_scales(model: PreTrainedModel) -> dict[str, float]:
    """Return scales of q, k and v of each layer, measured on sequences like those that are sampled."""
    with torch.no_grad(), observe_qkv(model) as observation:
        for seed in range(CALIBRATION_SEED, CALIBRATION_SEED + 8):
            model(repeating(8, seed).to(model.device))
    return observation.scales().named()


def sample(config: ServiceConfig, kv_scales: dict[str, float] | None) -> Sampled:
    """Sample one completion of each prompt, by an engine that this process starts."""

    async def sampled() -> Sampled:
        again = BeginUpload(version=1, source=PathSource(path=config.model.path), kv_scales=kv_scales)
        version = await commit(config, *([] if kv_scales is None else [again]))
        sampling = Sampling(
            max_tokens=TOKENS,
            ignore_eos=True,
            routed_experts_prompt_start=0 if config.engine.return_routed_experts else None,
        )
        prompts = repeating(PROMPTS, PROMPT_SEED, tokens=PERIOD + 4).tolist()
        # this process has used the GPU, so the engine's cannot be forked; no kernel of DeepGEMM is compiled ahead
        environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_DEEP_GEMM_WARMUP": "skip"} if GPU else {}
        # nothing is measured: others may use the GPU meanwhile
        arguments = {"kv_cache_memory_bytes": KV_CACHE_BYTES} if GPU else {}
        async with bare_engine(config, environment=environment, arguments=arguments) as running:
            await load_version(running, WeightLog(config.weights.root).folder(version), version)
            calls = [running.generate(f"{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
            return [(prompt, found[0]) for prompt, found in zip(prompts, await asyncio.gather(*calls), strict=True)]

    return asyncio.run(sampled())


class Trained:
    """A model's two trainers, in fp32 and BF16, with the same weights."""

    def __init__(self, name: Model, folder: Path) -> None:
        self.name, self.folder = name, folder
        # in fp32 on a GPU one expert after the other: grouped products are made for BF16
        one_by_one = {"experts_implementation": "eager"} if GPU and name in MIXTURES else {}
        self.fp32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **one_by_one).eval().to(DEVICE)
        self.bf16 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(DEVICE)

    def cases(self, engine: Engine, config: ServiceConfig, sampled: Sampled) -> Iterator[Json]:
        """Yield a case of each trainer of that engine that this model and machine have."""
        logprobs = torch.tensor([completion.logprobs for _, completion in sampled])
        ways = [(trainer, "") for trainer in TRAINERS.get(engine, (Trainer.FP32,))]
        if config.engine.return_routed_experts:
            ways += [(trainer, "routes replayed") for trainer in REPLAYED[engine]]
        for trainer, replay in ways:
            if trainer in OTHER_PRODUCTS and not GPU:
                continue  # on the CPU products are in fp32
            with self._computing(trainer, config) as model:
                scored = score(model, sampled, replay=bool(replay))
            yield mismatch(self.name, ", ".join(filter(None, (engine, trainer, replay))), scored, logprobs)

    @contextmanager
    def _computing(self, trainer: Trainer, config: ServiceConfig) -> Iterator[PreTrainedModel]:
        """The model that computes as that trainer; as the engine with ``config``, if it is one of those."""
        if trainer == Trainer.FP32:
            yield self.fp32
            return
        with ExitStack() as stack:
            if config.engine.lm_head == "float32":
                head = self.bf16.lm_head
                forwards = Forwards({head: lambda hidden: linear(hidden.float(), head.weight.float())})
                stack.callback(forwards.remove)
            if trainer == Trainer.AS_ENGINE:
                stack.enter_context(engine_roundings(self.bf16, recipe_of(config)))
            elif trainer != Trainer.BF16:
                products = OTHER_PRODUCTS.get(trainer)
                stack.enter_context(fake_quant(self.bf16, recipe_of(config), products=products))
            yield self.bf16


def recipe_of(config: ServiceConfig) -> TrainerRecipe:
    """Return what the ingest of a service with that configuration tells its trainer."""
    model = ServedModel.load(config.model.path)
    plan = model.plan(config.quant)
    return TrainerRecipe(
        weights=config.quant.weights,
        quantized=tuple(plan.quantized),
        experts=model.experts,
        kernels=config.with_gpus(GPU).engine_kernels,
    )


def config_of(model: Model, folder: Path, engine: Engine) -> ServiceConfig:
    """Return the configuration of an engine with that arithmetic; versions are written beside ``folder``."""
    settings: dict[str, Any] = {"max_model_len": 512, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    if GPU:
        settings["return_routed_experts"] = engine in REPLAYED and model in MIXTURES
    sections = SECTIONS[engine]
    return ServiceConfig.model_validate(
        {
            **sections,
            "model": {"path": folder},
            "engine": settings | sections.get("engine", {}),
            "weights": {"root": folder.parent / f"log-{folder.name}-{engine.name}", "source_roots": [folder.parent]},
        }
    )


def repeating(count: int, seed: int, tokens: int = TRAINED_TOKENS) -> torch.Tensor:
    """Return sequences [count, tokens] that repeat their first tokens over and over."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(FIRST_TOKEN, 128, (count, PERIOD), generator=generator)
    return start.repeat(1, -(-tokens // PERIOD))[:, :tokens]


def train(family: str, folder: Path) -> float:
    """Save a model of the family in BF16 after ``STEPS`` of AdamW; return its last loss in nats a token."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices: a second thread waits more than it works
    shape = FAMILIES[family]()
    one_by_one = {"experts_implementation": "eager"} if GPU and hasattr(shape, "num_experts") else {}
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, **one_by_one).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in range(STEPS):
        sequences = repeating(BATCH, step).to(DEVICE)
        loss = model(sequences, labels=sequences).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    return float(loss)


def make(model: Model, folder: Path) -> float | None:
    """Save the model in ``folder``; returns the last loss of its training, None of one that is not trained."""
    if model != Model.QWEN3_30B_A3B:
        return train(model, folder)
    if not GPU:
        raise ValueError(f"--model {model} has 1.3 billion parameters, which a GPU is wanted for")
    smaller = {"num_hidden_layers": 2, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
    shape = {name: value for name, value in SHAPES[Shape.QWEN3_30B_A3B].items() if name != "architectures"}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape | smaller), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return None


def table(cases: list[Json]) -> str:
    """Return a line for each engine with its trainer, and each model's k3."""
    models = [model for model in NAMES if any(case["model"] == model for case in cases)]
    k3 = {(case["engine"], case["model"]): f"{case['k3']:.1e}" if case["k3"] else "0" for case in cases}
    rows = [
        [engine, *(k3.get((engine, model), "") for model in models)] for engine in dict.fromkeys(each for each, _ in k3)
    ]
    return markdown_table(["engine, trainer", *(NAMES[model] for model in models)], rows)


def report() -> None:
    """Write the tables of all machines."""
    for machine in MACHINES:
        cases = sorted(results.cases(RESULT, machine_name=machine), key=lambda case: str(case["engine"]))
        write_part(PAGE, f"python -m benchmarks.mismatch.logprobs --report: {machine}", table(cases))


def main(options: SampleOptions) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/mismatch_logprobs.json; or report."""
    if options.report:
        report()
        return
    console, failed = Console(), list[BaseException]()
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root, ProcessPoolExecutor(options.jobs, spawned) as pool:
        for model in options.model:
            folder = Path(root) / model
            loss = make(model, folder)
            trained = Trained(model, folder)
            console.log(f"{model}: made, {'random' if loss is None else f'{loss:.3f} nats a token'}")
            configs = {engine: config_of(model, folder, engine) for engine in options.engine}
            scales = dict[Engine, dict[str, float]]()
            if Engine.FP8KV_MEASURED in configs:
                scales[Engine.FP8KV_MEASURED] = measured_scales(trained.fp32)
            sampling = {pool.submit(sample, config, scales.get(engine)): engine for engine, config in configs.items()}
            for future in as_completed(sampling):
                engine = sampling[future]
                if (error := future.exception()) is not None:
                    console.log(f"{model}, {engine}: {error}")
                    failed.append(error)
                    continue
                for case in trained.cases(engine, configs[engine], future.result()):
                    trained_for = 0 if loss is None else STEPS
                    of_model = {"steps": trained_for, "prompts": PROMPTS, "loss": loss}
                    results.add(RESULT, [case | of_model], SAME)
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} engines failed; the others' rows are written", failed)


if __name__ == "__main__":
    run(main)
