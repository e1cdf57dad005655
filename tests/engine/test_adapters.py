"""LoRA adapters in one engine: what they sample, beside each other and over changes."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout_service.engine.adapters import LoadedAdapter, ReplicaAdapters
from rollout_service.errors import InvalidManifest, TooEarly
from rollout_service.protocol.adapters import AdapterStatus, CommitAdapter, WantedAdapter
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import Kernels
from rollout_service.quant.engine_roundings import engine_roundings
from rollout_service.quant.fake_quant import fake_quant
from rollout_service.store.adapters import AdapterStore
from rollout_service.store.log import WeightLog
from tests.support.adapters import adapter_tensors, add_to, save_adapter
from tests.support.models import random_weights
from tests.support.one_engine import PROMPTS, OneEngine, running
from tests.support.reference import reference_logprobs, reference_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAMPLING = Sampling(n=2, max_tokens=12, temperature=1.0, ignore_eos=True)
MAX_LIVE = 4
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's merged layer → the model's own."""
Pairs = list[tuple[tuple[int, ...], Completion]]


class Adapted:
    """An engine with a weight version, its ingest, and the adapters that it holds."""

    def __init__(self, one: OneEngine, base: Path, is_fp8: bool) -> None:
        self.one, self.base, self._is_fp8 = one, base, is_fp8
        self.model = one.config.model.path
        log = one.config.weights.root_here()
        head = WeightLog(log).head()
        assert head is not None
        self.held = ReplicaAdapters(one.engine, AdapterStore(log), MAX_LIVE, lambda: head.digest)

    async def push(self, name: str, seed: int, **changes: object) -> AdapterStatus:
        """Commit a version of an adapter, which has its own folder, and have the engine hold what is committed."""
        folder = save_adapter(self.model.parent / f"{name}-{seed}", adapter_tensors(self.model, seed), **changes)
        status = await self.one.ingest.commit_adapter(name, CommitAdapter(path=str(folder)))
        await self.settle()
        return status

    async def settle(self) -> None:
        """Have the engine hold what is committed."""
        self.held.want(self.one.ingest.adapter_versions)
        await self.held.settle()

    async def generate(
        self, adapter: str | None, index: int = 0, exact: int | None = None, max_tokens: int = 12
    ) -> tuple[Completion, ...]:
        wanted = None if adapter is None else WantedAdapter(name=adapter, exact_version=exact)
        sampling = SAMPLING.model_copy(update={"max_tokens": max_tokens})
        with self.held.use(wanted) as loaded:
            name = f"{adapter}-{exact}-{index}-{max_tokens}"
            return await self.one.engine.generate(name, PROMPTS[index], sampling, adapter=loaded)

    async def sample(self, adapter: str | None, exact: int | None = None) -> Pairs:
        """Return prompts and completions, 16 pairs."""
        made = await asyncio.gather(*(self.generate(adapter, index, exact) for index in range(len(PROMPTS))))
        return [(prompt, each) for prompt, several in zip(PROMPTS, made, strict=True) for each in several]

    def difference(self, pairs: Pairs, seed: int | None) -> float:
        """Return the mean |Δ| of logprobs from those of the reference with the adapter of ``seed``."""
        reference = reference_model(self.model, self.base, fp8_activations=self._is_fp8, fp8_kv=False)
        if seed is not None:
            add_to(reference, adapter_tensors(self.model, seed))
        found = [reference_logprobs(reference, p, c.token_ids, 1.0) - torch.tensor(c.logprobs) for p, c in pairs]
        return float(torch.cat(found).abs().mean())


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "fp8_block"]
)
async def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        settings = {"adapters": {"max_live": MAX_LIVE, "max_rank": 8}, "enable_sleep_mode": True}
        async with running("qwen3", folder, patch, quant=request.param, **settings) as one:
            base = await one.update(1, random_weights(one.config.model.path, 0))
            yield Adapted(one, base, request.param != "none")


async def own_by_others(adapted: Adapted) -> dict[str | None, float]:
    """Push two adapters. Return how far each, and the model, is from its own reference, as a share of the least from
    another one's."""
    await adapted.push("run-a", 1)
    await adapted.push("run-b", 2)
    seeds = {"run-a": 1, "run-b": 2, None: None}
    shares = {}
    sampled = await asyncio.gather(*map(adapted.sample, seeds))  # in the same steps
    for (name, own), pairs in zip(seeds.items(), sampled, strict=True):
        found = {seed: adapted.difference(pairs, seed) for seed in seeds.values()}
        shares[name] = found.pop(own) / min(found.values())
    return shares


async def test_adapters_sample_like_their_references(adapted):
    shares = await own_by_others(adapted)
    assert all(share < 0.1 for share in shares.values()), shares


async def unequal_numbers(
    adapted: Adapted, folder: Path, kernels: Kernels
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share of unequal results in a trainer's layers with an adapter, given the engine's inputs: as PEFT
    computes them, and as the trainer does that imitates the engine."""
    await adapted.push("run-c", 3, lora_alpha=6)  # times 1.5: the engine rounds the scaled matrix
    await adapted.one.engine.ask_workers("save_adapted", str(folder))
    await adapted.generate("run-c", max_tokens=1)
    await adapted.one.ingest.remove_adapter("run-c")
    await adapted.settle()
    trainer, recipe = adapted.model.with_name("trainer-1"), await adapted.one.ingest.recipe()
    shutil.copy(adapted.model / "config.json", trainer)
    base = AutoModelForCausalLM.from_pretrained(trainer, dtype=torch.bfloat16)
    saved = {path.stem: torch.load(path) for path in folder.iterdir()}
    model = PeftModel.from_pretrained(base, trainer.with_name("run-c-3")).to(next(iter(saved.values()))[0].device)

    def unequal() -> dict[str, float]:
        shares = {}
        for name, (hidden, expected) in saved.items():
            block, _, leaf = name.rpartition(".")
            module = model.get_submodule(f"base_model.model.{block}")
            with torch.no_grad():
                found = torch.cat([getattr(module, part)(hidden) for part in MERGED.get(leaf, (leaf,))], -1)
            shares[name] = float((found != expected).float().mean())
        return shares

    plain = unequal()
    imitate = fake_quant if recipe.weights == "fp8_block" else engine_roundings
    with imitate(model, recipe, kernels=kernels):
        return plain, unequal()


async def test_a_trainers_adapted_layers_have_the_engines_results(adapted, tmp_path):
    plain, same = await unequal_numbers(adapted, tmp_path, "cpu")
    assert len(same) == 8
    assert min(plain.values()) > 0.1
    assert max(same.values()) < 1e-3  # another order of sums may end in another last bit


async def test_running_rollouts_keep_the_version_they_began_with(adapted):
    running = asyncio.create_task(adapted.generate("run-a", max_tokens=200))
    while not adapted.one.engine.tokens_since("run-a-None-0-200", [0, 0]):
        await asyncio.sleep(0)
    assert (await adapted.push("run-a", 3)).version == 2
    assert not running.done()
    new, old = await adapted.sample("run-a"), await adapted.sample("run-a", exact=1)
    whole = [(PROMPTS[0], each) for each in await running]
    for pairs, version, seed in ((whole, 1, 1), (old, 1, 1), (new, 2, 3)):
        assert {span.adapter_version for _, each in pairs for span in each.spans} == {version}
        assert adapted.difference(pairs, seed) < 0.2


async def test_adapters_are_there_again_after_memory_was_released(adapted):
    await adapted.one.sleep_and_wake(adapted.base, 1)
    assert adapted.difference(await adapted.sample("run-b"), 2) < 0.2
    assert adapted.difference(await adapted.sample(None), None) < 0.2


async def test_what_vllm_cannot_load_leaves_the_engine_sound(adapted):
    tensors = {name: tensor for name, tensor in adapter_tensors(adapted.model, 4).items() if "q_proj" in name}
    unknown = {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items()}
    folder = save_adapter(adapted.model.parent / "unknown", unknown)
    [known, *_] = adapted.one.ingest.adapter_versions
    with pytest.raises(InvalidManifest, match=r"vLLM has no LoRA for \['z_proj'\]"):
        await adapted.one.engine.add_adapter(LoadedAdapter(known, 99, folder))
    folder = save_adapter(adapted.model.parent / "too-large", tensors, r=512)
    with pytest.raises(InvalidManifest, match="rank 512"):
        await adapted.one.engine.add_adapter(LoadedAdapter(known, 99, folder))
    assert adapted.difference(await adapted.sample("run-b"), 2) < 0.2


async def test_a_removed_adapter_is_not_in_the_engine(adapted):
    await adapted.one.ingest.remove_adapter("run-a")
    await adapted.settle()
    assert [(held.name, held.version) for held in adapted.held.status()] == [("run-b", 1)]
    with pytest.raises(TooEarly):
        await adapted.generate("run-a")


async def test_full_places_leave_the_model_itself_as_it_is(adapted):
    for seed, name in enumerate(("run-c", "run-d", "run-e"), start=5):
        await adapted.push(name, seed)
    assert len(adapted.held.status()) == MAX_LIVE
    of_model, of_last = await asyncio.gather(adapted.sample(None), adapted.sample("run-e"))  # in the same steps
    assert adapted.difference(of_model, None) < 0.1 * adapted.difference(of_model, 7)
    assert adapted.difference(of_last, 7) < 0.1 * adapted.difference(of_last, None)
