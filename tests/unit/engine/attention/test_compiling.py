"""The kernels compile for the GPU that they are for: Triton brings the compiler, and needs no GPU for it."""

from collections.abc import Callable
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_service.engine.attention.grouping import RepeatedLaunch, choose_prefixes, fill_batch, form_chunks
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


class Kernel:
    """In the place of Triton's, whose launches need a GPU: it returns what it compiled for a launch, if anything."""

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.launched: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Compiled | None"]:
        def launch(*arguments: Any, num_warps: int) -> "Compiled | None":
            self.launched.append((f"compiled for {num_warps} warps", grid, arguments))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launched.append(("as compiled", grid, arguments))


@pytest.mark.parametrize("compiles", [True, False])
def test_what_was_compiled_is_launched_again_for_the_same_key_alone(compiles):
    kernel = Kernel(compiles)
    launch = RepeatedLaunch(kernel, num_warps=4)
    launch(8, "aligned", 1, 2)
    launch(5, "aligned", 3, 4)
    launch(5, "not aligned", 5, 6)
    assert kernel.launched == [
        ("compiled for 4 warps", (8,), (1, 2)),
        ("as compiled", (5, 1, 1), (3, 4)) if compiles else ("compiled for 4 warps", (5,), (3, 4)),
        ("compiled for 4 warps", (5,), (5, 6)),
    ]
