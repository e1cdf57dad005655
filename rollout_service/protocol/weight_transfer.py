"""What a trainer says on vLLM's weight-transfer routes, and how the bytes that it broadcasts are cut. Needs no torch.

vLLM 0.32 and 0.33, ``vllm/entrypoints/rl/online/api_router.py`` and ``vllm/distributed/weight_transfer``:

    POST /init_weight_transfer_engine      {"init_info": TransferInit}    both join a group; the trainer is rank 0
    POST /start_weight_update              StartUpdate or nothing
    POST /update_weights                   {"update_info": TensorsToCome}  while the trainer broadcasts these tensors
    POST /finish_weight_update             FinishUpdate or nothing
    POST /shutdown_weight_transfer_engine

The bytes do not come over HTTP but over the group. Tensors are broadcast in the order in which they were announced,
each by itself or packed: their bytes one after the other, cut as ``broadcasts`` says, which both sides work out from
the announcement.
"""

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollout_service.protocol.base import Frozen

TransferBackend = Literal["nccl", "gloo"]
"""What the group speaks: NCCL if the ingest has a GPU, gloo if it has none."""
TransferState = Literal["no group", "joining", "joined", "started", "receiving", "finishing"]
"""Where a transfer stands; the transitions are in ``ingest/weight_transfer.py``."""

NCCL_UNIQUE_ID_BYTES = 128
LARGEST_PACKED_BUFFER_BYTES = 16 << 30
"""vLLM's default is 1 GiB; SkyRL takes that or the model's largest parameter."""
MOST_PACKED_BUFFERS = 16

WIRE_DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""Dtypes that can be received, and their size. A version takes fewer; the others are received, and then refused: a
trainer that has begun to broadcast cannot be stopped."""


class TransferInit(Frozen):
    """How to join the trainer's group: vLLM's ``NCCLWeightTransferInitInfo``."""

    rank_offset: int = Field(ge=1)
    """Our rank: the trainer is rank 0, and we are one rank, however many engines there are."""
    world_size: int = Field(ge=2)
    master_address: str | None = Field(default=None, min_length=1, max_length=255)
    """Where the trainer serves the group's store,"""
    master_port: int | None = Field(default=None, ge=1, le=65535)
    """and its port."""
    nccl_unique_id_b64: str | None = None
    """In place of an address: the id that the trainer had NCCL make, in standard base64."""
    packed: bool = False
    packed_buffer_size_bytes: int = Field(default=1 << 30, ge=1, le=LARGEST_PACKED_BUFFER_BYTES)
    packed_num_buffers: int = Field(default=2, ge=1, le=MOST_PACKED_BUFFERS)
    """How many the trainer fills in turns; of no matter to what is received."""

    @field_validator("nccl_unique_id_b64")
    @classmethod
    def _is_a_unique_id(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            decoded = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"is not standard base64 ({error})") from error
        if len(decoded) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(f"must be {NCCL_UNIQUE_ID_BYTES} bytes in base64, not {len(decoded)}")
        return value

    @model_validator(mode="after")
    def _can_be_joined(self) -> "TransferInit":
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset={self.rank_offset} is no rank of a world of {self.world_size}")
        by_address = self.master_address is not None and self.master_port is not None
        halves = (self.master_address is None) != (self.master_port is None)
        if halves or by_address == (self.nccl_unique_id_b64 is not None):
            raise ValueError("give either master_address and master_port, or nccl_unique_id_b64")
        return self


class StartUpdate(Frozen):
    """Body of ``POST /start_weight_update``, where there is one."""

    is_checkpoint_format: Literal[True] = True
    """As TRL's async trainer says: tensors come under a checkpoint's names, not as kernels hold them."""


class TensorsToCome(Frozen):
    """The tensors that the trainer broadcasts next, in order: vLLM's ``NCCLWeightTransferUpdateInfo``.

    vLLM 0.33's trainer leaves the three lists empty in a round that repeats the tensors of the round before.
    """

    names: tuple[str, ...] = ()
    dtype_names: tuple[str, ...] = ()
    """As torch spells them without its name: ``bfloat16``."""
    shapes: tuple[tuple[int, ...], ...] = ()
    packed: bool | None = None
    """Where trainers for vLLM below 0.28 say it; None: as the group was joined."""
    packed_buffer_size_bytes: int | None = Field(default=None, ge=1, le=LARGEST_PACKED_BUFFER_BYTES)
    packed_num_buffers: int | None = Field(default=None, ge=1, le=MOST_PACKED_BUFFERS)

    @model_validator(mode="after")
    def _says_the_same_of_each(self) -> "TensorsToCome":
        counts = {"names": len(self.names), "dtype_names": len(self.dtype_names), "shapes": len(self.shapes)}
        if len({*counts.values()}) > 1:
            raise ValueError(f"must have as many of each, not {counts}")
        if unknown := sorted({*self.dtype_names} - WIRE_DTYPE_BYTES.keys()):
            raise ValueError(f"dtype_names has {', '.join(unknown)}: there are {', '.join(WIRE_DTYPE_BYTES)}")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise ValueError("shapes has a negative size")
        return self

    def as_before(self, before: "TensorsToCome") -> "TensorsToCome":
        """Return the table of ``before``, packed as this announcement says, or else as ``before`` was."""
        packing = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        return before.model_copy(update=self.model_dump(include=packing, exclude_none=True))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [
            math.prod(shape) * WIRE_DTYPE_BYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtype_names, strict=True)
        ]


class FinishUpdate(Frozen):
    """Body of ``POST /finish_weight_update``, where there is one."""

    weight_version: str | None = Field(default=None, max_length=256)
    """A label; where it is an integer above the newest version's number, that is the number of this version."""


class TransferStatus(Frozen):
    """Where the service's receiver stands."""

    backend: TransferBackend
    state: TransferState
    error: str | None = None
    """Why the last group or the last update failed; None once there is a new one."""


def broadcasts(sizes: Sequence[int], packed_buffer_bytes: int | None) -> Iterator[range]:
    """Which tensors come in one broadcast, by their places in the announcement.

    Packed, a broadcast ends with the tensor that makes it larger than ``packed_buffer_bytes``, as in vLLM's
    ``packed_tensor.py``. None: one broadcast a tensor.
    """
    first, nbytes = 0, 0
    for place, size in enumerate(sizes):
        nbytes += size
        if packed_buffer_bytes is None or nbytes > packed_buffer_bytes:
            yield range(first, place + 1)
            first, nbytes = place + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


def total(sizes: Sequence[int], places: Iterable[int]) -> int:
    """Bytes of one broadcast."""
    return sum(sizes[place] for place in places)
