"""Whether logprobs of groups whose prompt is read once are as near to a trainer's as FlashAttention's; on a Hopper GPU.

    python -m benchmarks.mismatch.groups

A small model with heads as Qwen3's, trained on the spot (``repeating.py``) on sequences as long as these. Each engine
samples ``--n`` completions of each of ``--groups`` prompts, first all at once, then in quarters: the other sums of
another batch are the noise that any difference between two kernels is to be held against. A forward pass in fp32 with
the unquantized weights scores the same tokens; formulas as in ``benchmarks.mismatch.logprobs``. ``--attention auto``
runs on the CPU, where it says nothing of groups.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.mismatch.logprobs import (
    DEVICE,
    KV_CACHE_BYTES,
    PROMPT_SEED,
    Case,
    Engine,
    Model,
    Sampled,
    SampleOptions,
    config_of,
    mismatch,
    score,
    table_of,
)
from benchmarks.mismatch.repeating import repeating, train_shape
from rollout_service.config import ServiceConfig
from rollout_service.engine.attention.choice import MIN_SHARED_TOKENS
from rollout_service.protocol.sampling import Sampling
from rollout_service.store.log import WeightLog

RESULT = "mismatch_groups"
SAME = ("model", "engine")
PARTS = (1, 4)
"""Batches that the work is done in."""
BATCH = 4
"""Sequences in a step of training."""


class GroupOptions(Options):
    """The model and the work."""

    attention: tuple[str, ...] = ("FLASH_ATTN", "group")
    """engine.attention_backend; may be repeated."""
    groups: int = 32
    """Distinct prompts."""
    n: int = 8
    """Completions of each."""
    prompt: int = MIN_SHARED_TOKENS + 88
    """Tokens of a prompt; groups share whole pages of it."""
    tokens: int = 64
    """Sampled for each completion."""
    steps: int = 300
    """Of training."""


def wide_heads(longest: int) -> Qwen3Config:
    """Heads of 128 numbers, four query heads of each KV head."""
    return Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=longest, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


async def sampled(config: ServiceConfig, options: GroupOptions) -> AsyncIterator[tuple[int, Sampled, tuple[int, int]]]:
    """For each of ``PARTS``: its number, prompts with completions, and what attention read and did not have to."""
    version = await commit(config)
    sampling = Sampling(n=options.n, max_tokens=options.tokens, ignore_eos=True)
    prompts = [tuple(prompt) for prompt in repeating(options.groups, PROMPT_SEED, options.prompt).tolist()]
    arguments = {"kv_cache_memory_bytes": KV_CACHE_BYTES} if torch.cuda.is_available() else {}
    async with bare_engine(config, arguments=arguments) as engine:
        await load_version(engine, WeightLog(config.weights.root).folder(version), version)
        before = 0, 0
        for parts in PARTS:
            size, found = -(-len(prompts) // parts), Sampled()
            for first in range(0, len(prompts), size):
                part = prompts[first : first + size]
                calls = [engine.generate(f"{parts}-{first}-{i}", prompt, sampling) for i, prompt in enumerate(part)]
                answers = zip(part, await asyncio.gather(*calls), strict=True)
                found += [(list(prompt), completion) for prompt, completions in answers for completion in completions]
            await engine.kv_reads()
            attended, spared = await engine.kv_reads()
            yield parts, found, (attended - before[0], spared - before[1])
            before = attended, spared


async def measure(folder: Path, attention: str, options: GroupOptions) -> list[tuple[Case, float]]:
    """One engine's cases, and the share of tokens that it did not have to read again."""
    config = config_of(Model.QWEN3, folder / "model", Engine.FP8KV, SampleOptions())
    weights = config.weights.model_copy(update={"root": folder / f"log-{attention}"})
    sequences, longest = options.groups * options.n, options.prompt + options.tokens
    engine = config.engine.model_copy(
        update={"attention_backend": attention, "max_model_len": longest, "max_num_seqs": sequences}
    )
    config = config.model_copy(update={"engine": engine, "weights": weights})
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval().to(DEVICE)
    found = []
    async for parts, samples, (attended, spared) in sampled(config, options):
        engines = torch.tensor([completion.logprobs for _, completion in samples])
        batches = "all at once" if parts == 1 else f"in {parts} parts"
        case = mismatch("qwen3, wide heads", f"{attention}, {batches}", score(reference, samples), engines)
        found.append((case, spared / (attended or 1)))
    return found


def main(options: GroupOptions) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/mismatch_groups.json."""
    console, cases = Console(), list[Case]()
    longest = options.prompt + options.tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        loss = train_shape(wide_heads(longest), path / "model", options.steps, BATCH, longest, DEVICE)
        console.log(f"trained to {loss:.3f} nats a token")
        for attention in options.attention:
            for case, spared in asyncio.run(measure(path, attention, options)):
                cases.append(case)
                new = asdict(case) | {"spared_share": spared, "loss": loss, "work": options.model_dump()}
                results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [new], SAME)})
                console.log(f"{case.engine}: k3 {case.k3:.2e}, {spared:.1%} of the tokens not read again")
    console.print(table_of(cases))
    first = cases[0]
    console.print(f"k3 to that of {first.engine}: {', '.join(f'{c.engine} {c.k3 / first.k3:.3f}' for c in cases[1:])}")


if __name__ == "__main__":
    run(main)
