"""Bodies of vLLM's weight-transfer routes, and where packed broadcasts are cut."""

import base64

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.protocol.weight_transfer import (
    WIRE_DTYPE_BYTES,
    TensorsToCome,
    TransferInit,
    broadcasts,
)

ADDRESS = {"master_address": "10.0.0.1", "master_port": 51216}
UNIQUE_ID = base64.b64encode(bytes(128)).decode()


def init(**fields: object) -> TransferInit:
    return TransferInit.model_validate({"rank_offset": 1, "world_size": 2} | fields)


@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 64))
def test_packed_broadcasts_are_cut_as_vllm_cuts_them(sizes, buffer_bytes):
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    named = iter([(str(place), torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)])
    theirs = []
    while (chunk := pack_tensors(named, lambda item: item[1], buffer_bytes)) is not None:
        theirs.append([int(name) for name in chunk.names])
    assert [list(places) for places in broadcasts(sizes, buffer_bytes)] == theirs


def test_plain_broadcasts_have_one_tensor_each():
    assert [list(places) for places in broadcasts([5, 0, 7], None)] == [[0], [1], [2]]


def test_sizes_of_dtypes_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in WIRE_DTYPE_BYTES} == WIRE_DTYPE_BYTES


def test_a_group_is_joined_by_address_or_by_unique_id():
    assert init(**ADDRESS).packed_buffer_size_bytes == 1 << 30
    assert init(nccl_unique_id_b64=UNIQUE_ID).master_address is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "give either master_address and master_port, or nccl_unique_id_b64"),
        ({**ADDRESS, "nccl_unique_id_b64": UNIQUE_ID}, "give either"),
        ({"master_address": "10.0.0.1"}, "give either"),
        ({"nccl_unique_id_b64": "AAAA"}, "must be 128 bytes in base64, not 3"),
        ({"nccl_unique_id_b64": "_-_-"}, "is not standard base64"),
        ({**ADDRESS, "rank_offset": 2}, "rank_offset=2 is no rank of a world of 2"),
        ({**ADDRESS, "packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({**ADDRESS, "group_name": "x"}, "group_name"),
    ],
)
def test_what_cannot_be_joined_is_refused(fields, problem):
    with pytest.raises(ValidationError, match=problem):
        init(**fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"shapes": []}, "as many of each"),
        ({"dtype_names": ["torch.bfloat16"]}, r"dtype_names has torch.bfloat16: there are float64"),
        ({"shapes": [[-1]]}, "greater than or equal to 0"),
        ({"shapes": [[1] * 65]}, "at most 64 items"),
        ({"ipc_handles": []}, "ipc_handles"),
    ],
)
def test_tensors_that_cannot_be_received_are_refused(fields, problem):
    with pytest.raises(ValidationError, match=problem):
        TensorsToCome.model_validate({"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]} | fields)


def test_an_announcement_tells_the_bytes_of_each_tensor():
    announced = TensorsToCome(names=("a", "b"), dtype_names=("bfloat16", "float32"), shapes=((2, 3), ()))
    assert announced.sizes == [12, 4]


def test_an_empty_table_repeats_one_packed_as_it_says():
    before = TensorsToCome(names=("a",), dtype_names=("int8",), shapes=((3,),), packed=True, packed_num_buffers=3)
    assert TensorsToCome().as_before(before) == before
    assert TensorsToCome(packed=False).as_before(before) == before.model_copy(update={"packed": False})
