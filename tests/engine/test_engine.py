"""The engine adapter around real vLLM engines: are its logprobs right, and does half a version ever serve?"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from vllm import envs

from benchmarks.common.engine import commit
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter, completion, vllm_sampling
from rollout_service.errors import EngineFailed, InvalidRequest
from rollout_service.fleet.continuation import merge_completions, slice_completion
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling, Scoring, StructuredOutputs
from rollout_service.protocol.upload import BeginUpload, PathSource
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE, read_manifest
from tests.support.fp8_cache import CACHE_DTYPE
from tests.support.one_engine import engine_of, prompt_logprobs
from tests.support.penalties import whole_with
from tests.support.reference import reference_logprobs, reference_model
from tests.support.telltale import assert_pure, canary_weights

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPERATURE = 0.8
SAMPLING = Sampling(n=4, max_tokens=48, temperature=TEMPERATURE, ignore_eos=True)
PROMPTS = [tuple(range(5 + i, 25 + 3 * i)) for i in range(8)]
SEQUENCES = 16

# Bounds on |Δ|, the difference of a token's logprob from the fp32 reference, over 1536 tokens.
# BF16: the engine rounds each activation to 8 bits, the reference none. About 30 roundings of 2⁻⁹ relative on the way
# to logits of a few units give 0.01 on average; seen: mean 0.010, largest 0.055.
BF16_MEAN, BF16_MAX = 0.02, 0.15
# FP8: an activation that differs by such a rounding can fall to the neighbouring E4M3 code, 2⁻³ relative away, so both
# sides quantize rightly and yet differently; seen: mean 0.028, largest 0.17.
FP8_MEAN, FP8_MAX = 0.06, 0.45
# Neither side is biased: the signed mean is that of 1536 independent errors of about 0.04, which is 0.001.
BIAS = 0.006


def lively_weights(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Random weights whose distributions are far from uniform, so that a wrong layer shows in the logprobs."""
    generator = torch.Generator().manual_seed(seed)
    weights = canary_weights(model_path, 0)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        elif name == "lm_head.weight":
            noise *= 0.12
        elif "embed" not in name:
            noise *= 0.5 * tensor.shape[1] ** -0.5
        weights[name] = noise.bfloat16()
    return weights


async def committed(tmp_path: Path, quant: str, kv_cache_dtype: str, **engine: int) -> ServiceConfig:
    """A log whose version 0 are lively weights, and the configuration of an engine for it.

    ``engine``: of its settings.
    """
    make_tiny_qwen3(tmp_path / "model")
    save_file(lively_weights(tmp_path / "model", seed=0), tmp_path / "model/model.safetensors")
    config = ServiceConfig.model_validate(
        {
            "model": {"path": tmp_path / "model"},
            "quant": {"weights": quant},
            "engine": {"max_model_len": 512, **engine},
            "kv_cache": {"dtype": kv_cache_dtype},
            "weights": {"root": tmp_path / "log", "source_roots": [tmp_path], "keep_versions": 3},
        }
    )
    await commit(config)
    return config


async def commit_weights(config: ServiceConfig, versions: Mapping[int, dict[str, torch.Tensor]]) -> None:
    """Add versions of these weights to the log."""
    uploads = []
    for version, weights in versions.items():
        folder = config.model.path.parent / f"trainer-{version}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        uploads.append(BeginUpload(version=version, source=PathSource(path=folder)))
    await commit(config, *uploads)


@asynccontextmanager
async def running_engine(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineAdapter]:
    """An engine that has version 0 loaded."""
    async with engine_of(config, monkeypatch) as engine:
        await load(engine, WeightLog(config.weights.root).folder(0), 0)
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ServiceConfig, EngineAdapter]]:
    """An engine in FP8 for the tests that leave it open; of more than ``SEQUENCES`` some wait."""
    settings = {"max_model_len": 4096, "max_num_seqs": SEQUENCES}
    config = await committed(tmp_path_factory.mktemp("served"), "fp8_block", CACHE_DTYPE, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with running_engine(config, monkeypatch) as engine:
            yield config, engine


async def load(engine: EngineAdapter, folder: Path, version: int) -> None:
    await engine.pause("keep")
    await engine.load(folder, version)
    await engine.resume()


async def sample(engine: EngineAdapter) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompt and completion, 32 pairs."""
    rollouts = await asyncio.gather(*(engine.generate(f"r{i}", p, SAMPLING) for i, p in enumerate(PROMPTS)))
    return [(prompt, c) for prompt, completions in zip(PROMPTS, rollouts, strict=True) for c in completions]


def differences(
    pairs: list[tuple[tuple[int, ...], Completion]], model: torch.nn.Module, temperature: float = TEMPERATURE
) -> torch.Tensor:
    """Reference minus engine, for every token."""
    return torch.cat(
        [reference_logprobs(model, p, c.token_ids, temperature) - torch.tensor(c.logprobs) for p, c in pairs]
    )


async def test_an_fp8_engine_returns_the_logprobs_of_a_forward_pass(served):
    config, engine = served
    await load(engine, WeightLog(config.weights.root).folder(0), 0)
    assert_logprobs(await sample(engine), config, FP8_MEAN, FP8_MAX)


async def test_candidates_and_prompt_logprobs_are_the_models(served):
    config, engine = served
    await load(engine, WeightLog(config.weights.root).folder(0), 0)
    prompt, asked = PROMPTS[3], Sampling(max_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=2)
    [sampled] = await engine.generate("sampled", prompt, asked)
    assert sampled.top_logprobs is not None and sampled.prompt_logprobs is not None
    for token, logprob, candidates in zip(sampled.token_ids, sampled.logprobs, sampled.top_logprobs, strict=True):
        assert [candidate.rank for candidate in candidates] == list(range(1, 21))
        assert [c.logprob for c in candidates] == sorted((c.logprob for c in candidates), reverse=True)
        assert logprob in [c.logprob for c in candidates if c.token_id == token] or logprob <= candidates[-1].logprob
        assert 0.15 < sum(math.exp(candidate.logprob) for candidate in candidates) < 1
    scores = await prompt_logprobs(engine, "scored", prompt)
    first, *rest = sampled.prompt_logprobs
    assert first is None and [each[0].token_id for each in rest] == list(prompt[1:])
    assert [each[0].logprob for each in rest] == pytest.approx(scores, abs=FP8_MAX)  # the batches differ
    assert all([c.rank for c in each[1:]] == [1, 2] for each in rest)
    # of what could not be drawn there is nothing
    [cut] = await engine.generate("cut", prompt, asked.model_copy(update={"top_k": 3}))
    assert cut.top_logprobs is not None
    for candidates in cut.top_logprobs:  # of logits in BF16 several may be the third largest
        assert len(candidates) >= 3
        assert {candidate.logprob for candidate in candidates[3:]} <= {candidates[2].logprob}


async def test_scores_are_the_prompt_logprobs_from_a_token_on(served):
    config, engine = served
    await load(engine, WeightLog(config.weights.root).folder(0), 0)
    prompt, asked = PROMPTS[3], Sampling(max_tokens=1, ignore_eos=True, prompt_logprobs=3)
    [whole] = await engine.generate("whole", prompt, asked)
    [scored] = await engine.generate("scored", prompt, asked, scoring=Scoring(start=4))
    assert whole.prompt_logprobs is not None and scored.scores is not None
    expected = [each for row in whole.prompt_logprobs[4:] for each in row or ()]
    ids, logprobs = scored.scores.unpacked()
    assert ids.tolist() == [each.token_id for each in expected]
    assert logprobs.tolist() == pytest.approx([each.logprob for each in expected], abs=FP8_MAX)
    assert scored.scores.offsets == list(range(0, 4 * (len(prompt) - 4) + 1, 4))
    assert (scored.prompt_logprobs, scored.scores.num_top_logprobs) == (None, 3)


async def test_target_tokens_are_refused_without_a_gpu(served):
    targets = Scoring(start=2, target_token_ids=((5, 6), (7,)))
    with pytest.raises(InvalidRequest, match="prompt_logprob_token_ids requires the V2 model runner"):
        await served[1].generate("targets", (5, 6, 7, 8), Sampling(max_tokens=1), scoring=targets)


async def test_an_engine_says_what_attends_and_that_nothing_is_spared(served):
    _, engine = served
    assert engine.attention_backends == ("CPU_ATTN",)
    assert await engine.kv_reads() == (0, 0)


@pytest.mark.usefixtures("served")
async def test_what_vllm_reads_of_the_environment_for_each_token_is_remembered(monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    assert not envs.VLLM_COMPUTE_NANS_IN_LOGITS


async def test_a_bias_steers_what_is_drawn_and_wrong_structure_is_refused(served):
    config, engine = served
    await load(engine, WeightLog(config.weights.root).folder(0), 0)
    biased = Sampling(n=4, max_tokens=4, ignore_eos=True, logit_bias={7: 100.0})
    assert {c.token_ids for c in await engine.generate("biased", PROMPTS[0], biased)} == {(7, 7, 7, 7)}
    with pytest.raises(InvalidRequest, match="regex"):
        wrong = StructuredOutputs(regex="(")
        await engine.generate("wrong", PROMPTS[0], Sampling(structured_outputs=wrong))


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"presence_penalty": -1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.4},
    ],
    ids=["completion", "all", "prompt"],
)
async def test_penalties_of_a_completion_that_goes_on_are_those_of_one_that_was_not_cut(served, penalties):
    config, engine = served
    await load(engine, WeightLog(config.weights.root).folder(0), 0)
    cuts = await whole_with(engine, PROMPTS[1] * 2, penalties)
    gone_on = await cuts.differences(counted=True)
    assert gone_on.numel() > 1500
    assert gone_on.mean() < FP8_MEAN and gone_on.max() < FP8_MAX
    if len(penalties) > 1:  # the repetition penalty alone counts the prompt's tokens, and so these, by itself
        assert (await cuts.differences(counted=False)).mean() > FP8_MEAN


@pytest.mark.slow
async def test_so_does_one_in_bf16(tmp_path, monkeypatch):
    config = await committed(tmp_path, "none", "bfloat16")
    async with running_engine(config, monkeypatch) as engine:
        pairs = await sample(engine)
    assert_logprobs(pairs, config, BF16_MEAN, BF16_MAX)


def assert_logprobs(
    pairs: list[tuple[tuple[int, ...], Completion]], config: ServiceConfig, mean: float, largest: float
) -> None:
    """Those of the fp32 reference with version 0."""
    folder, fp8_kv = WeightLog(config.weights.root).folder(0), config.kv_cache.dtype == "fp8_e4m3"
    fp8_activations = config.quant.weights == "fp8_block"
    model = reference_model(config.model.path, folder, fp8_activations=fp8_activations, fp8_kv=fp8_kv)
    difference = differences(pairs, model)
    assert difference.numel() == 1536
    assert difference.abs().mean() < mean and difference.abs().max() < largest
    assert difference.mean().abs() < BIAS
    # and the bounds tell right from wrong: the temperature left out, and one of the 28 matrices left at zero
    assert differences(pairs, model, temperature=1.0).abs().mean() > 4 * mean
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight.zero_()
    wrong = differences(pairs, model).abs().mean()
    assert wrong > 1.5 * mean, wrong


async def test_the_prefix_cache_is_per_version_and_priority_is_obeyed(served):
    config, engine = served
    # the log keeps version 0, too
    await commit_weights(config, {version: canary_weights(config.model.path, version) for version in (1, 2)})
    log, prompt = WeightLog(config.weights.root), (5, 6, 7) * 100
    greedy = vllm_sampling(Sampling(max_tokens=4, temperature=0.0))

    async def cached_tokens() -> int:
        (output,) = [output async for output in engine._stream("r", prompt, greedy)]
        assert_pure(completion(output.outputs[0]))
        return int(output.num_cached_tokens)

    for version in (1, 2):
        await load(engine, log.folder(version), version)
        assert [await cached_tokens() > 200 for _ in range(2)] == [False, True]

    # all but one place are taken, so that those who wait come one by one
    taken = Sampling(n=SEQUENCES - 1, max_tokens=4000, ignore_eos=True)
    taking = asyncio.create_task(engine.generate("taken", (5, 6), taken))
    while engine.scheduler.load(1, 0).running < SEQUENCES - 1:
        await asyncio.sleep(0.01)
    await engine.pause("keep")
    finished: list[int] = []
    waiting = [asyncio.create_task(_finish(engine, priority, finished)) for priority in (0, 5, -5, 1)]
    while engine._llm.output_processor.get_num_unfinished_requests() < SEQUENCES - 1 + len(waiting):
        await asyncio.sleep(0)  # all are on their way to the engine, and the order to resume comes after them
    await engine.resume()
    await asyncio.gather(*waiting)
    assert finished == [-5, 0, 1, 5] and not taking.done()
    await engine.abort()
    await taking


async def test_a_waiting_pause_can_be_cancelled_or_overridden(served):
    config, engine = served
    endless, short = Sampling(max_tokens=4000, ignore_eos=True), Sampling(max_tokens=4, ignore_eos=True)
    folder = WeightLog(config.weights.root).folder(0)
    await load(engine, folder, 0)

    async def waiting_pause() -> asyncio.Task[None]:
        pausing = asyncio.create_task(engine.pause("wait"))
        while not await engine._llm.is_paused():
            await asyncio.sleep(0)
        assert not pausing.done()
        return pausing

    long = asyncio.create_task(engine.generate("long", (5, 6), endless))
    while engine.scheduler.load(1, 0).running == 0:
        await asyncio.sleep(0.01)
    # taken back: what came meanwhile begins, and the long rollout has not ended
    pausing = await waiting_pause()
    queued = asyncio.create_task(engine.generate("queued", (5, 6), short))
    pausing.cancel()
    await engine.resume()
    assert [len(c.token_ids) for c in await queued] == [4] and not long.done()
    # kept in its place, for a version
    pausing = await waiting_pause()
    await engine.pause("keep")
    await pausing
    await engine.load(folder, 1)
    await engine.resume()
    # and ended in its place
    pausing = await waiting_pause()
    await engine.pause("abort")
    (aborted,) = await long
    assert aborted.finish_reason == "abort" and aborted.versions == (0, 1)
    await pausing
    await engine.resume()
    assert [c.versions for c in await engine.generate("next", (5, 6), short)] == [(1,)]


async def test_a_wait_finishes_what_a_pause_has_preempted(served):
    config, engine = served
    folder = WeightLog(config.weights.root).folder(0)
    await load(engine, folder, 0)
    held = asyncio.create_task(engine.generate("held", (5, 6), Sampling(max_tokens=400, ignore_eos=True)))
    while not engine.tokens_since("held", [0]):
        await asyncio.sleep(0.01)
    await engine.pause("keep")  # and drop the cache
    assert not held.done()
    await engine.pause("wait")
    await engine.load(folder, 1)
    await engine.resume()
    [whole] = await held
    assert len(whole.token_ids) == 400 and whole.versions == (0,)


async def test_exact_call_ends_when_another_version_is_loaded(served):
    config, engine = served
    folder = WeightLog(config.weights.root).folder(0)
    await load(engine, folder, 0)
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    exact = asyncio.create_task(engine.generate("exact", (5, 6), endless, exact_version=0))
    free = asyncio.create_task(engine.generate("free", (5, 6), endless))
    while not (engine.tokens_since("exact", [0]) and engine.tokens_since("free", [0])):
        await asyncio.sleep(0.01)
    await engine.pause("keep")
    await engine.load(folder, 1)
    # submitted while paused, as by a replica that checked its version just before
    late = asyncio.create_task(engine.generate("late", (5, 6), Sampling(max_tokens=4), exact_version=0))
    await engine.resume()
    [ended], [cut] = await exact, await late
    assert (ended.finish_reason, ended.versions) == ("abort", (0,)) and ended.token_ids
    assert (cut.finish_reason, cut.token_ids) == ("abort", ())
    await engine.pause("abort")
    [goes_on] = await free
    assert goes_on.versions[0] == 0
    await engine.resume()


async def test_what_is_made_meanwhile_is_what_comes_in_the_end(served):
    """Tokens, logprobs, candidates and the version that made each, for a reader at every step and for a slow one."""
    config, engine = served
    folder = WeightLog(config.weights.root).folder(0)
    await load(engine, folder, 0)
    several = Sampling(n=6, max_tokens=300, ignore_eos=True, stop_token_ids=tuple(range(64, 68)), logprobs=2)
    making = asyncio.create_task(engine.generate("several", PROMPTS[0], several))
    quick, slow = Reader(engine, "several", several), Reader(engine, "several", several)
    version = 0
    while not making.done():
        if quick.read() and version < 24:  # an update at each of the first steps
            version += 1
            await load(engine, folder, version)
        if version % 7 == 6:
            slow.read()
        await asyncio.sleep(0)
    final = await making
    assert max(len(c.spans) for c in final) > 12 and max(len(c.token_ids) for c in final) > 24
    for reader in (quick, slow):
        for whole in final:
            read = reader.made[whole.index]
            length = len(read.token_ids)
            assert read.token_ids == whole.token_ids[:length]
            assert (read.logprobs, read.top_logprobs or ()) == (
                whole.logprobs[:length], (whole.top_logprobs or ())[:length],
            )  # fmt: skip
            assert read.spans == slice_completion(whole, 0, length).spans
    ended = [c for c in quick.made if c.finish_reason != "abort"]
    assert 0 < len(ended) < len(final) and all(c == final[c.index] for c in ended)
    assert all(len(c.token_ids) > 0 for c in quick.made) and any(len(c.token_ids) > 0 for c in slow.made)
    assert engine.tokens_since("several", [0] * 6) == []


class Reader:
    """Reads along what an engine makes of a call."""

    def __init__(self, engine: EngineAdapter, request_id: str, sampling: Sampling) -> None:
        self._engine, self._request_id, self._candidates = engine, request_id, sampling.logprobs or 0
        self._call = GenerateCall(request_id=request_id, prompt_token_ids=PROMPTS[0], sampling=sampling)
        empty = {"token_ids": (), "logprobs": (), "finish_reason": "abort", "spans": ()}
        self.made = [Completion(index=index, **empty) for index in range(sampling.n)]

    def read(self) -> bool:
        """Whether there was anything new."""
        since = [len(completion.token_ids) for completion in self.made]
        pieces = self._engine.tokens_since(self._request_id, since, self._candidates)
        for piece in pieces:
            self.made[piece.index] = merge_completions(self._call, self.made[piece.index], piece)
        return any(piece.token_ids for piece in pieces)


async def _finish(engine: EngineAdapter, priority: int, finished: list[int]) -> None:
    await engine.generate(f"p{priority}", (5, 6), Sampling(max_tokens=8, ignore_eos=True), priority)
    finished.append(priority)


async def test_a_hung_core_fails_the_health_check(served, monkeypatch):
    _, engine = served
    [core] = [each for each in psutil.Process().children() if "EngineCore" in each.cmdline()[0]]
    core.suspend()
    try:
        for _ in range(3):
            await engine.check_health()
            await asyncio.sleep(0)
        monkeypatch.setattr(envs, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 1)
        with pytest.raises(EngineFailed, match="the engine core has not answered for 2 s, more than 2 s"):
            while True:
                await engine.check_health()
                await asyncio.sleep(0.01)
    finally:
        core.resume()
    await engine.generate("after", (5, 6), Sampling(max_tokens=4))
    await engine.check_health()


async def test_a_loading_engine_is_healthy_and_a_failed_load_is_final(served, monkeypatch):
    """The last test of this engine: it is of no use afterwards."""
    config, engine = served
    folder = WeightLog(config.weights.root).folder(0)
    await engine.pause("keep")
    loading = asyncio.create_task(engine.load(folder, 1))
    await asyncio.sleep(0)  # it has begun
    meanwhile = asyncio.create_task(engine.generate("meanwhile", (5, 6), Sampling(max_tokens=4)))
    while not loading.done():  # or Serve would replace what takes long to load
        await engine.check_health()
        await asyncio.sleep(0.01)
    await loading
    await engine.resume()
    assert [span.version for c in await meanwhile for span in c.spans] == [1]
    await assert_what_runs_is_given_back(engine, version=1)
    await engine.pause("keep")
    monkeypatch.setattr("rollout_service.engine.adapter.LOAD_LIMIT_S", 0.0)
    loading = asyncio.create_task(engine.load(folder, 1))
    await asyncio.sleep(0)
    with pytest.raises(EngineFailed, match="has been loading for 0 s, more than 0 s"):
        await engine.check_health()
    await loading
    await engine.check_health()
    await engine.resume()
    manifest = read_manifest(folder)
    kept = tuple(tensor for tensor in manifest.tensors if "layers.2.mlp" not in tensor.name)
    (folder / MANIFEST_FILE).write_bytes(manifest.replace(tensors=kept).to_json())
    await engine.pause("keep")
    going = asyncio.create_task(engine.generate("kept", (5, 6), Sampling(max_tokens=4)))
    await asyncio.sleep(0)  # it is in the engine
    with pytest.raises(EngineFailed, match="loading version 2 failed"):
        await engine.load(folder, 2)
    with pytest.raises(EngineFailed, match="kept was under way when loading version 2 failed"):
        await going
    for call in (engine.check_health(), engine.resume(), engine.generate("r", (5, 6), Sampling(max_tokens=1))):
        with pytest.raises(EngineFailed, match="being replaced"):
            await call


async def assert_what_runs_is_given_back(engine: EngineAdapter, version: int) -> None:
    """Aborted completions come back with the tokens they have, while the engine serves and while it is closed."""
    sampling = Sampling(n=2, max_tokens=400, ignore_eos=True)
    for closed in (False, True):
        running = asyncio.create_task(engine.generate("runs", (5, 6), sampling))
        await engine.generate("meanwhile", (5, 6), Sampling(max_tokens=8, ignore_eos=True))
        if closed:
            await engine.pause("keep")
        await engine.abort()
        completions = await running
        assert [c.finish_reason for c in completions] == ["abort", "abort"]
        assert all(0 < len(c.token_ids) < 400 and c.versions == (version,) for c in completions)
    await engine.resume()
    assert [c.finish_reason for c in await engine.generate("after", (5, 6), Sampling(max_tokens=8))] != ["abort"]
