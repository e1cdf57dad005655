"""The kernels compile for the GPU that they are for: Triton brings the compiler, and needs no GPU for it."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_service.engine.attention.grouping import choose_prefixes, fill_batch, form_chunks
from rollout_service.engine.attention.merging import merge_rows, spread_queries

HOPPER = GPUTarget("cuda", 90, 32)
HEADS = {"HEADS": 32, "SIZE": 128, "GROUP": 8, "PADDED": 128}
NUMBERS = {"count", "page", "min_pages", "row_stride", "entry_stride", "token_stride", "lse_head_stride"}
NUMBERS |= {"lse_row_stride"}


@pytest.mark.parametrize(
    ("kernel", "constants", "pointers"),
    [
        (choose_prefixes, {"CHUNK": 16, "STEPS": 10, "N": 256}, {}),
        (form_chunks, {"CHUNK": 16, "N": 256}, {}),
        (fill_batch, {"COPY": 512, "N": 256}, {"reads": "*i64"}),
        (spread_queries, HEADS, {"query": "*fp8e4nv", "rows": "*fp8e4nv"}),
        (spread_queries, HEADS, {"query": "*bf16", "rows": "*bf16"}),
        (merge_rows, HEADS, {"partial": "*bf16", "lse": "*fp32", "output": "*bf16"}),
    ],
)
def test_a_kernel_compiles_for_hopper(kernel, constants, pointers):
    others = {name: "i32" if name in NUMBERS else "*i32" for name in kernel.arg_names}
    signature = others | pointers | dict.fromkeys(constants, "constexpr")
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=HOPPER)
    assert made.asm["cubin"]
