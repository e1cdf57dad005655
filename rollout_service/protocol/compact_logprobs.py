"""Logprobs as packed numbers, in the format of prime-rl's renderers 0.1.13.dev17."""

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollout_service.protocol.base import Frozen


class CompactLogprobs(Frozen):
    """Logprobs of some positions. Position ``i`` has the entries ``offsets[i]`` to ``offsets[i + 1]``.

    The first entry of a position is the token there, then come the most likely tokens; or the entries are target
    tokens.
    """

    data: str
    """Base64 of the token id of each entry (u32, little endian), then of the logprob of each (f32, little endian). Must
    be the first field: prime-rl's client searches the reply's bytes for its name."""
    format: Literal["u32-f32-le-v1"] = "u32-f32-le-v1"
    offsets: list[int] = Field(min_length=1)
    """[positions + 1]"""
    num_top_logprobs: int
    """The number of top logprobs that the request asked for."""

    @classmethod
    def of(
        cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, offsets: Sequence[int], num_top: int
    ) -> "CompactLogprobs":
        """Pack the token id and the logprob of each entry."""
        data = np.asarray(token_ids, "<u4").tobytes() + np.asarray(logprobs, "<f4").tobytes()
        return cls(data=base64.b64encode(data).decode(), offsets=list(offsets), num_top_logprobs=num_top)

    def unpacked(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Return the token id and the logprob of each entry. Raises ValueError if their number is not the offsets'."""
        data, entries = base64.b64decode(self.data, validate=True), self.offsets[-1]
        if len(data) != 8 * entries:
            raise ValueError(f"compact logprobs have {len(data)} bytes for {entries} entries of 8 bytes")
        return np.frombuffer(data, "<u4", entries), np.frombuffer(data, "<f4", entries, 4 * entries)
