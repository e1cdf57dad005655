"""vLLM's FlashAttention backend, extended to read a group's prompt once per decode step and to read FP8 caches faster.

The metadata builder groups a step in which every sequence decodes one token, before its CUDA graph runs. FlashAttention
reads both the shared and the private tokens. The exception is an FP8 cache with head size 128: ``fp8_decode.py`` reads
its private tokens. All other batches, such as those with prompts, use vLLM's own backend. ``choice.py`` decides for
which models the service uses this backend. The checks here protect users who name the backend to vLLM directly.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rollout_service.compat.vllm_attention import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
    flash_attention_calls,
    is_quantized_kv_cache,
    kv_cache_parts,
    qkv_scales,
)
from rollout_service.engine.attention import fp8_decode
from rollout_service.engine.attention.choice import (
    FLASH_ATTENTION_3,
    HEAD_SIZES,
    MIN_SHARED_TOKENS,
    QUERIES_PER_KV_HEAD,
)
from rollout_service.engine.attention.decoding import (
    FlashAttend,
    chunk_sequences,
    grouped_decode,
    grouped_fp8_decode,
    splits,
)
from rollout_service.engine.attention.grouping import Entries, Grouped, Grouping, KVReads

FLASH_ATTENTION = 3
"""The FlashAttention version for which decoding several rows per entry was measured."""
MAX_ENTRIES = 992
"""Maximum number of entries for which FlashAttention 3 chooses the splits of each
(``hopper/flash_prepare_scheduler.cu``). Larger batches use vLLM's own decode."""
MAX_SEQUENCES = MAX_ENTRIES * 2 // 3


class GroupAttentionBackend(FlashAttentionBackend):
    """The capabilities that vLLM asks for, and the implementing classes."""

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend enumeration that is reserved for plug-ins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["GroupAttentionImpl"]:
        """Return the class of one layer's attention."""
        return GroupAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["GroupAttentionMetadataBuilder"]:
        """Return the class that builds each step's metadata."""
        return GroupAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return True for the measured head sizes."""
        return head_size in HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return True for GPUs with FlashAttention 3."""
        return capability.major == FLASH_ATTENTION_3

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return True for decoders."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def _refuse(cls) -> bool:
        """Return False, where FlashAttention's own class may return True."""
        return False

    supports_batch_invariance = _refuse  # the partition of a sequence depends on the rest of the batch
    supports_sliding_window = supports_rswa = _refuse  # a window may begin after the shared tokens
    supports_sink = _refuse  # each partial result would count the sink
    supports_non_causal = supports_mm_prefix = _refuse
    supports_per_head_quant_scales = _refuse  # not tested
    supports_device_cpu_query_lens_mismatch = _refuse  # the CPU's lengths decide whether a batch decodes single tokens


@dataclass
class GroupAttentionMetadata(FlashAttentionMetadata):
    """Metadata of one step. Without ``grouped`` it equals FlashAttention's own."""

    grouped: Grouped | None = None
    grouped_schedule: torch.Tensor | None = None
    """FlashAttention's schedule for the grouped batch, or for its shared entries only."""
    grouped_splits: int = 0
    own_kernel: fp8_decode.Variant | None = None
    """Configuration of the kernel that reads private tokens. None: FlashAttention reads them with the shared ones."""


class GroupAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Groups the batch of a step that decodes one token per sequence."""

    supports_update_block_table = False
    requires_block_table_width = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return full CUDA graphs for steps that decode single tokens. Other steps run their attention outside of
        graphs."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, block_table_width: int
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        most = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.grouping = Grouping(
            min(most, MAX_SEQUENCES),
            block_table_width,
            self.block_size,
            chunk_sequences(self.num_heads_q, self.num_heads_kv),
            -(-MIN_SHARED_TOKENS // self.block_size),
            device,
        )
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].impl.reads = self.grouping.reads
        # room for each entry's part of FlashAttention's schedule, as in the parent builder
        self.grouped_schedule = torch.zeros(1 + 4 * (MAX_ENTRIES + 4), dtype=torch.int32, device=device)
        self.reads_fp8_itself = (
            is_quantized_kv_cache(self.cache_config.cache_dtype)
            and self.headdim == fp8_decode.SIZE
            and self.num_heads_q <= self.num_heads_kv * fp8_decode.ROWS
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GroupAttentionMetadata:
        """Queue the grouping of the batch, or call FlashAttention's builder."""
        batch = common_attn_metadata
        if not self._decodes(batch):
            return GroupAttentionMetadata(**vars(super().build(common_prefix_len, batch, fast_build)))
        # a fast build skips the schedule of the ungrouped batch, which would not be used
        metadata = GroupAttentionMetadata(**vars(super().build(common_prefix_len, batch, fast_build=True)))
        grouped = self.grouping.group(batch.block_table_tensor, batch.seq_lens)
        metadata.grouped = grouped
        entries, rows = (grouped.shared, grouped.sequences) if self.reads_fp8_itself else (grouped, grouped.rows)
        metadata.grouped_splits = splits(rows, self.attention_config.flash_attn_max_num_splits_for_cuda_graph)
        metadata.grouped_schedule = self._schedule(entries, batch.max_seq_len, metadata.grouped_splits)
        if self.reads_fp8_itself:
            parts = fp8_decode.splits_of(grouped.sequences, self.num_heads_kv)
            metadata.own_kernel = fp8_decode.Variant(splits=parts)
        return metadata

    def _decodes(self, batch: CommonAttentionMetadata) -> bool:
        """Return True if each row is one token of one sequence, and there are at least two rows to group."""
        return (
            batch.max_query_len == 1
            and batch.causal is True
            and batch.num_actual_tokens == batch.num_reqs
            and 1 < batch.num_reqs <= MAX_SEQUENCES
        )

    def _schedule(self, grouped: Entries, max_tokens: int, max_splits: int) -> torch.Tensor:
        """Return FlashAttention's schedule, in the buffer that CUDA graphs read."""
        quantized = is_quantized_kv_cache(self.cache_config.cache_dtype)
        made: torch.Tensor = flash_attention_calls().get_scheduler_metadata(
            batch_size=len(grouped),
            max_seqlen_q=grouped.max_rows,
            max_seqlen_k=max_tokens,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            headdim=self.headdim,
            cache_seqlens=grouped.lengths,
            qkv_dtype=torch.float8_e4m3fn if quantized else self.kv_cache_dtype,
            cu_seqlens_q=grouped.starts,
            page_size=self.block_size,
            causal=False,
            num_splits=max_splits,
        )
        self.grouped_schedule[: len(made)] = made
        # as in FlashAttention's builder, so that a graph does not read an older schedule
        self.grouped_schedule[len(made) :] = 0
        return self.grouped_schedule[: len(made)]


class GroupAttentionImpl(FlashAttentionImpl):
    """Attention of one layer.

    Raises NotImplementedError, like FlashAttention, for features that vLLM does not ask the backend about.
    """

    supports_dcp = False
    reads: KVReads
    """The read counter of the builder that groups this layer's batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wrong = [
            what
            for what, there in {
                f"FlashAttention {self.vllm_flash_attn_version}": self.vllm_flash_attn_version != FLASH_ATTENTION,
                f"{self.num_queries_per_kv} query heads of a KV head": self.num_queries_per_kv
                not in QUERIES_PER_KV_HEAD,
                "ALiBi": self.alibi_slopes is not None,
                "a sliding window": self.sliding_window != (-1, -1),
                "a soft cap of logits": bool(self.logits_soft_cap),
                "attention sinks": self.sinks is not None,
            }.items()
            if there
        ]
        if wrong:
            raise NotImplementedError(
                f"attention that reads a group's prompt once is not there for {', '.join(wrong)}: set "
                "engine.attention_backend: FLASH_ATTN"
            )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GroupAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention, see ``FlashAttentionImpl.forward``. The cache already holds this step's keys and
        values."""
        grouped = None if attn_metadata is None else attn_metadata.grouped
        if grouped is None or output_scale is not None or output_block_scale is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert attn_metadata is not None
        keys, values = kv_cache_parts(kv_cache, self.head_size)
        if is_quantized_kv_cache(self.kv_cache_dtype):
            keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
        attend = FlashAttend(
            kernel=flash_attention_calls().flash_attn_varlen_func,
            keys=keys,
            values=values,
            scale=self.scale,
            descales=qkv_scales(layer),
            max_tokens=attn_metadata.max_seq_len,
            schedule=attn_metadata.grouped_schedule,
            splits=attn_metadata.grouped_splits,
        )
        count = grouped.sequences
        if attn_metadata.own_kernel is None:
            grouped_decode(query[:count], grouped, attend, output[:count])
        else:
            grouped_fp8_decode(query[:count], grouped, attend, attn_metadata.own_kernel, output[:count])
        return output
