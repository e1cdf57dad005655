"""Messages of vLLM's weight-transfer routes, and the packing of broadcast tensors. Needs no torch.

vLLM 0.32 and 0.33, ``vllm/entrypoints/rl/online/api_router.py`` and ``vllm/distributed/weight_transfer``:

    POST /init_weight_transfer_engine      {"init_info": TransferInit}    both join a group; the trainer is rank 0
    POST /start_weight_update              StartUpdate or nothing
    POST /update_weights                   {"update_info": TensorsToCome}  while the trainer broadcasts these tensors
    POST /finish_weight_update             FinishUpdate or nothing
    POST /shutdown_weight_transfer_engine

The bytes are broadcast in the group, not sent over HTTP. Tensors are broadcast in the order of their announcement, each
by itself or packed. Packed tensors are concatenated and split as ``broadcasts`` defines, which both ends compute from
the announcement.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.tensors import AnnouncedShape

TransferBackend = Literal["nccl", "gloo"]
"""Backend of the group: NCCL if the ingest has a GPU, gloo if it has none."""
TransferState = Literal["no group", "joining", "joined", "started", "receiving", "finishing"]
"""State of a transfer; the transitions are in ``ingest/weight_transfer.py``."""

NCCL_UNIQUE_ID_BYTES = 128
LARGEST_PACKED_BUFFER_BYTES = 16 << 30
"""Maximum size in bytes. vLLM's default is 1 GiB; SkyRL uses that or the size of the model's largest parameter."""
MAX_PACKED_BUFFERS = 16

WIRE_DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""Dtypes that can be received, with their sizes in bytes. A version accepts fewer; the others are received and then
refused, because a trainer that has begun to broadcast cannot be stopped."""


class TransferInit(Frozen):
    """Parameters for joining the trainer's group: vLLM's ``NCCLWeightTransferInitInfo``."""

    rank_offset: int = Field(ge=1)
    """The ingest's rank. The trainer is rank 0; the ingest is a single rank for all engines."""
    world_size: int = Field(ge=2)
    master_address: str | None = Field(default=None, min_length=1, max_length=255)
    """Address of the group's store, which the trainer serves,"""
    master_port: int | None = Field(default=None, ge=1, le=65535)
    """and its port."""
    nccl_unique_id_b64: str | None = None
    """The trainer's NCCL unique id, in standard base64, in place of an address."""
    packed: bool = False
    packed_buffer_size_bytes: int = Field(default=1 << 30, ge=1, le=LARGEST_PACKED_BUFFER_BYTES)
    packed_num_buffers: int = Field(default=2, ge=1, le=MAX_PACKED_BUFFERS)
    """Number of buffers that the trainer fills in turn; has no effect on the receiver."""

    @field_validator("nccl_unique_id_b64")
    @classmethod
    def _is_a_unique_id(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            decoded = base64.b64decode(value, validate=True)
        except ValueError as error:
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
    """Body of ``POST /start_weight_update``; may be absent."""

    is_checkpoint_format: Literal[True] = True
    """Tensors come under a checkpoint's names, not in the layout of kernels. TRL's async trainer sends it."""


class TensorsToCome(Frozen):
    """The tensors that the trainer broadcasts next, in order: vLLM's ``NCCLWeightTransferUpdateInfo``.

    vLLM 0.33's trainer leaves the three lists empty in a round that repeats the tensors of the round before.
    """

    names: tuple[str, ...] = ()
    dtype_names: tuple[str, ...] = ()
    """Names of torch dtypes without the prefix ``torch.``: ``bfloat16``."""
    shapes: tuple[AnnouncedShape, ...] = ()
    packed: bool | None = None
    """Set by trainers for vLLM below 0.28; None: as in TransferInit."""
    packed_buffer_size_bytes: int | None = Field(default=None, ge=1, le=LARGEST_PACKED_BUFFER_BYTES)
    packed_num_buffers: int | None = Field(default=None, ge=1, le=MAX_PACKED_BUFFERS)

    @model_validator(mode="after")
    def _says_the_same_of_each(self) -> "TensorsToCome":
        counts = {"names": len(self.names), "dtype_names": len(self.dtype_names), "shapes": len(self.shapes)}
        if len({*counts.values()}) > 1:
            raise ValueError(f"must have as many of each, not {counts}")
        if unknown := sorted({*self.dtype_names} - WIRE_DTYPE_BYTES.keys()):
            raise ValueError(f"dtype_names has {', '.join(unknown)}: there are {', '.join(WIRE_DTYPE_BYTES)}")
        return self

    def as_before(self, before: "TensorsToCome") -> "TensorsToCome":
        """Return the table of ``before`` with this announcement's packing, where given, else with the packing of
        ``before``."""
        packing = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        return before.model_copy(update=self.model_dump(include=packing, exclude_none=True))

    @property
    def sizes(self) -> list[int]:
        """Return the size in bytes of each tensor."""
        return [
            math.prod(shape) * WIRE_DTYPE_BYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtype_names, strict=True)
        ]


class FinishUpdate(Frozen):
    """Body of ``POST /finish_weight_update``; may be absent."""

    weight_version: str | None = Field(default=None, max_length=256)
    """A label. If it is an integer above the newest version's number, it is also the number of this version."""


class TransferStatus(Frozen):
    """State of the service's receiver."""

    backend: TransferBackend
    state: TransferState
    error: str | None = None
    """Reason why the last group or update failed; None once there is a new one."""


def broadcasts(sizes: Sequence[int], packed_buffer_bytes: int | None) -> Iterator[range]:
    """Yield the tensors of each broadcast, as ranges of places in the announcement.

    A packed broadcast ends with the tensor that makes it larger than ``packed_buffer_bytes``, as in vLLM's
    ``packed_tensor.py``. None: one broadcast per tensor.
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
    """Return the size in bytes of one broadcast."""
    return sum(sizes[place] for place in places)
