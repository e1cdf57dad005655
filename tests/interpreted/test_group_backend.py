"""From vLLM's metadata of a step to the attention's result, through the backend's own builder and layer: Triton's
interpreter, with plain attention where FlashAttention's calls would be. vLLM's configuration is a real one."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rollout_service.engine.attention import backend, fp8_decode
from rollout_service.engine.attention.backend import (
    GroupAttentionBackend,
    GroupAttentionImpl,
    GroupAttentionMetadataBuilder,
)
from rollout_service.engine.attention.choice import MIN_SHARED_TOKENS
from rollout_service.engine.attention.worker import AttentionWorker
from tests.support.shared_pages import Batch, batch_of, paged_attention

PAGE, HEADS, KV_HEADS, SIZE = 64, 8, 2, 128
MAX_PAGES = 16
PROMPT = [f"prompt {i}" for i in range(MIN_SHARED_TOKENS // PAGE)]
SEQUENCES = [(PROMPT, 5), ([], 70), (PROMPT, 64), (PROMPT[:2], 40), (PROMPT, 1)]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "num_hidden_layers": 1}
    made = Qwen3Config(**shape, hidden_size=128, vocab_size=128, max_position_embeddings=MAX_PAGES * PAGE)
    made.architectures = ["Qwen3ForCausalLM"]
    made.save_pretrained(folder)
    args = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, block_size=PAGE)
    return args.create_engine_config()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Arguments of each call of attention, in FlashAttention's place."""
    made: list[dict[str, Any]] = []

    def attention(**given: Any) -> Any:
        made.append(given)
        return paged_attention(**given)

    def schedule(**given: Any) -> torch.Tensor:
        return torch.arange(1 + 4 * given["batch_size"], dtype=torch.int32)

    there = SimpleNamespace(flash_attn_varlen_func=attention, get_scheduler_metadata=schedule)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(backend, "flash_attention_calls", lambda: there)
    yield made


def builder(vllm_config: VllmConfig, layers: tuple[str, ...] = ()) -> GroupAttentionMetadataBuilder:
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
    with set_current_vllm_config(vllm_config):
        return GroupAttentionMetadataBuilder(spec, [*layers], vllm_config, torch.device("cpu"), MAX_PAGES)


def metadata_of(batch: Batch, *, query_len: int = 1) -> CommonAttentionMetadata:
    count = len(batch.lengths)
    starts = torch.arange(count + 1, dtype=torch.int32) * query_len
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=batch.lengths, num_reqs=count,
        num_actual_tokens=count * query_len, max_query_len=query_len, max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.tables, slot_mapping=torch.zeros(count * query_len, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize("cache_kind", ["HND", "NHD", "FP8"])
def test_a_step_of_single_tokens_is_grouped_and_attended(vllm_config, calls, cache_kind, monkeypatch):
    """HND, NHD: vLLM's names for whether a page's heads or its tokens come first in memory; the shape is the same. FP8:
    own tokens are read by the decode kernel, and shared ones by FlashAttention, whose schedule is of these alone."""
    torch.manual_seed(0)
    is_fp8 = cache_kind == "FP8"
    dtype, name, (q_scale, k_scale, v_scale) = torch.float32, "auto", (1.0, 1.0, 1.0)
    if is_fp8:
        dtype, name, (q_scale, k_scale, v_scale) = torch.float8_e4m3fn, "fp8_e4m3", (0.5, 2.0, 0.25)
        monkeypatch.setattr(vllm_config.cache_config, "cache_dtype", name)
        monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True)
        monkeypatch.setattr(fp8_decode, "_PROGRAMS", 64)  # each takes a while in the interpreter
    batch = batch_of(SEQUENCES, PAGE, padding=2, width=MAX_PAGES)
    count = len(batch.lengths)
    made = builder(vllm_config).build(0, metadata_of(batch))
    assert made.grouped is not None and made.grouped.max_rows == 64 * KV_HEADS // HEADS
    assert (made.grouped.shared_rows >= 0).tolist() == [True, False, True, False, True, False, False]
    assert made.grouped_schedule is not None and made.grouped_splits == 32
    assert len(made.grouped.shared) == count // 2 and (made.own_kernel is not None) == is_fp8

    with set_current_vllm_config(vllm_config):
        layer = GroupAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, name)
    cache = torch.randn(int(batch.tables.max()) + 1, KV_HEADS, PAGE, 2 * SIZE).to(dtype)
    if cache_kind == "NHD":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    query = torch.randn(9, HEADS, SIZE).to(dtype)  # two rows more than the step has: the padding of a piecewise graph
    output, none = torch.full(query.shape, 7.0), torch.empty(0)
    scales: Any = SimpleNamespace(
        _q_scale=torch.tensor(q_scale), _k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale)
    )
    held = cache.view(torch.uint8) if is_fp8 else cache
    assert layer.forward(scales, query, none, none, held, made, output) is output

    [call] = calls
    assert call["fa_version"] == 3 and call["scheduler_metadata"] is made.grouped_schedule
    if is_fp8:
        assert made.own_kernel is not None and made.own_kernel.splits == 8
        assert call["q"].shape[0] == count and call["seqused_k"].tolist() == [MIN_SHARED_TOKENS, 0, 0]
    keys, values = cache.float().transpose(1, 2).split(SIZE, dim=-1)
    bound = 2e-3 if is_fp8 else 2e-6
    for sequence, length in enumerate(batch.lengths.tolist()):
        pages = torch.tensor(batch.pages(sequence), dtype=torch.long)
        k, v = (part[pages].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        logits = torch.einsum("hd,thd->ht", query[sequence].float(), k) * SIZE**-0.5 * q_scale * k_scale
        expected = torch.einsum("ht,thd->hd", logits.softmax(-1), v * v_scale) if length else torch.zeros(HEADS, SIZE)
        torch.testing.assert_close(output[sequence], expected, atol=bound, rtol=bound)
    assert (output[7:] == 7.0).all()


class Layer(AttentionLayerBase):
    """One that vLLM would make of the backend."""

    def __init__(self) -> None:
        self.impl = GroupAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")

    def get_attn_backend(self) -> type[GroupAttentionBackend]:
        return GroupAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


@pytest.mark.usefixtures("calls")
def test_a_worker_says_what_attends_and_what_it_did_not_read(vllm_config, monkeypatch):
    with set_current_vllm_config(vllm_config):
        layers = {"layers.0.attn": Layer(), "layers.1.attn": Layer()}
    monkeypatch.setattr(vllm_config.compilation_config, "static_forward_context", layers)
    worker = AttentionWorker()
    worker.weight_transfer_engine = SimpleNamespace(vllm_config=vllm_config)
    assert worker.attention_backends() == ["group"]
    assert worker.kv_reads() == (0, 0)
    batch = batch_of(SEQUENCES, PAGE, padding=2, width=MAX_PAGES)
    builder(vllm_config, tuple(layers)).build(0, metadata_of(batch))
    worker.kv_reads()
    assert worker.kv_reads() == (int(batch.lengths.sum()), 2 * MIN_SHARED_TOKENS)  # of one layer; three share a prompt


@pytest.mark.usefixtures("calls")
def test_schedules_of_all_steps_lie_at_one_address_and_leave_nothing_behind(vllm_config):
    steps = builder(vllm_config)
    large = steps.build(0, metadata_of(batch_of(SEQUENCES, PAGE, width=MAX_PAGES))).grouped_schedule
    small = steps.build(0, metadata_of(batch_of(SEQUENCES[:2], PAGE, width=MAX_PAGES))).grouped_schedule
    assert large is not None and small is not None
    assert large.data_ptr() == small.data_ptr() and len(small) < len(large)
    assert not steps.grouped_schedule[len(small) :].any()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("what", ["several tokens", "one sequence", "not causal", "too many sequences"])
def test_other_steps_are_flash_attentions(vllm_config, what):
    batch = batch_of(SEQUENCES, PAGE, width=MAX_PAGES)
    given = metadata_of(batch, query_len=2 if what == "several tokens" else 1)
    if what == "one sequence":
        given = metadata_of(batch_of(SEQUENCES[:1], PAGE, width=MAX_PAGES))
    elif what == "not causal":
        given.causal = False
    elif what == "too many sequences":
        many = backend.MAX_SEQUENCES + 1
        given = metadata_of(Batch(PAGE, batch.tables[:1].expand(many, -1), batch.lengths[:1].expand(many)))
    steps = builder(vllm_config)
    steps.aot_schedule = False  # of the batch as it is, which FlashAttention's library makes
    made = steps.build(0, given)
    assert made.grouped is None and made.seq_lens is given.seq_lens and made.block_table is given.block_table_tensor


@pytest.mark.usefixtures("calls")
def test_graphs_are_captured_for_single_tokens_and_never_take_another_block_table(vllm_config):
    steps = builder(vllm_config)
    assert steps.get_cudagraph_support(vllm_config, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert not steps.supports_update_block_table and not steps.supports_draft_decode_metadata_update
    zeros = Batch(PAGE, torch.zeros(4, MAX_PAGES, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
    captured = steps.build_for_cudagraph_capture(metadata_of(zeros))
    assert captured.grouped is not None and captured.grouped.starts.tolist() == [0, 0, 0, 1, 2, 3, 4]
