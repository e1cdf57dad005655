"""The variants of the decode kernel, as far as a machine without a GPU can tell."""

import math

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels.fp8_decode import VARIANTS, Case
from rollout_service.engine.attention.fp8_decode import ROWS, SIZE, Variant, decode_part

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10
"""Of a program, on Hopper."""
POINTERS = {"q": "*i16", "keys": "*i16", "values": "*i16", "tables": "*i32", "lengths": "*i32", "out": "*bf16"}
POINTERS |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "lse", "before_lse"), "*fp32")
POINTERS |= {"before_rows": "*i32", "before_out": "*bf16"}
ALIGNED = ("q", "keys", "values", "out", "lse", "q_stride", "page_stride", "token_stride", "head_stride")


@pytest.mark.parametrize("variant", [VARIANTS[0], Variant("bits", warps=2)], ids=str)
def test_a_variant_compiles_for_hopper_and_moves_codes_as_it_should(variant: Variant) -> None:
    """Copies of 16 bytes to shared memory, and matrices from there to the tensor cores, those of values transposed."""
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "PAGE": 64, "BLOCK": variant.block, "SPLITS": variant.splits,
        "STAGES": variant.stages, "WAY": variant.way, "ROWS": ROWS, "PAIRS": SIZE // 2,
    }  # fmt: skip
    names = decode_part.arg_names
    signature = {name: POINTERS.get(name, "i32") for name in names} | {"softmax_scale": "fp32"}
    source = ASTSource(
        fn=decode_part,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    made = triton.compile(source, target=HOPPER, options={"num_warps": variant.warps})
    assert made.metadata.shared <= SHARED_BYTES
    assert "cp.async.cg.shared.global" in made.asm["ptx"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in made.asm["ptx"]
    assert ("cvt.rn.f16x2.e4m3x2" in made.asm["ptx"]) == (variant.way == "cvt")


def case(error: float, lse_error: float = 0.001) -> Case:
    return Case("s", "heads first", 1, 1, 64, "v", 1.0, 4.0, 1.3, 3.0, error, 0.01, lse_error)


def test_a_variant_is_right_if_it_is_as_near_to_fp32_as_flash_attention() -> None:
    assert case(0.015).is_right
    assert not case(0.03).is_right and not case(math.nan).is_right
    assert not case(0.01, lse_error=0.1).is_right and not case(0.01, lse_error=math.nan).is_right


def test_no_variant_runs_twice() -> None:
    assert len(set(map(str, VARIANTS))) == len(VARIANTS)
