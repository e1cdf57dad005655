"""Routed experts of the tokens of a completion, packed for replies. Needs only numpy.

The format is that of prime-rl's renderers. A token takes layers × topk bytes (twice that from 257 experts on), and a
third more in base64. Qwen3-30B-A3B, with 48 layers and 8 experts a token, takes 384 bytes, 512 in base64.
"""

import base64
import binascii
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rollout_service.protocol.base import Frozen

Experts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Known = npt.NDArray[np.bool_]


class RoutedExperts(Frozen):
    """One row for each of the consecutive tokens of a prompt and its completion.

    A token's row holds the experts that processed it, whose output sampled the next token. The last token of a
    completion has no row: no engine has read it.
    """

    # must be the first field, and the reply must have no blanks: renderers finds the data by the bytes before it
    data: str
    """Base64 of [tokens, layers, topk], row-major, little-endian: the experts' numbers within their layer. A layer
    without experts has zeros."""
    shape: tuple[NonNegativeInt, PositiveInt, PositiveInt]
    """[tokens, layers, topk]; all layers of the model."""
    start: NonNegativeInt
    """Index of the first row's token, counted from the beginning of the prompt."""
    dtype: Literal["uint8", "uint16"]
    """``uint8`` for up to 256 experts."""
    missing: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = Field(default=(), max_length=4096)
    """Ranges [from, to) of tokens, counted from the same beginning, with unknown rows, which are zeros here. Their
    replica died before it reported them."""

    @model_validator(mode="after")
    def _holds_its_shape(self) -> Self:
        tokens, layers, topk = self.shape
        nbytes = tokens * layers * topk * np.dtype(self.dtype).itemsize
        if len(self.data) != -(-nbytes // 3) * 4:
            raise ValueError(f"{len(self.data)} characters of base64 are not the {nbytes} bytes of {list(self.shape)}")
        if any(not self.start <= first < end <= self.end for first, end in self.missing):
            raise ValueError(f"missing tokens {self.missing} do not lie in [{self.start}, {self.end})")
        return self

    @classmethod
    def of(cls, experts: Experts, start: int, missing: tuple[tuple[int, int], ...] = ()) -> Self:
        """Pack rows [tokens, layers, topk]; the first is the row of token ``start``."""
        dtype: Literal["uint8", "uint16"] = "uint8" if experts.dtype == np.uint8 else "uint16"
        data = base64.b64encode(np.ascontiguousarray(experts, dtype=f"<{np.dtype(dtype).str[1:]}").tobytes()).decode()
        tokens, layers, topk = experts.shape
        return cls(data=data, shape=(tokens, layers, topk), start=start, dtype=dtype, missing=missing)

    @property
    def end(self) -> int:
        """Return the token after that of the last row."""
        return self.start + self.shape[0]

    def rows(self) -> Experts:
        """Return [tokens, layers, topk], read-only. Raises ValueError for invalid base64."""
        try:
            held = base64.b64decode(self.data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"routed experts are no base64: {error}") from error
        rows: Experts = np.frombuffer(held, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)
        return rows

    def unpacked(self, tokens: int) -> tuple[Experts, Known]:
        """Return the experts of a prompt and its completion, [tokens, layers, topk], and the mask of known tokens, bool
        [tokens].

        Unknown are the tokens before ``start``, the missing ones and the last; their rows are zeros. Raises ValueError
        if there are more rows than ``tokens``.
        """
        if self.end > tokens:
            raise ValueError(f"routed experts of tokens [{self.start}, {self.end}) of a sequence of {tokens}")
        experts: Experts = np.zeros((tokens, *self.shape[1:]), self.dtype)
        experts[self.start : self.end] = self.rows()
        known = np.zeros(tokens, np.bool_)
        known[self.start : self.end] = True
        for first, end in self.missing:
            known[first:end] = False
        return experts, known

    def followed_by(self, rest: "RoutedExperts") -> "RoutedExperts":
        """Append ``rest``, which begins where this ends or later; rows between them are missing.

        Raises ValueError if ``rest`` begins earlier, or belongs to another model.
        """
        gap = rest.start - self.end
        if gap < 0 or (rest.shape[1:], rest.dtype) != (self.shape[1:], self.dtype):
            raise ValueError(
                f"routed experts {rest.dtype} {list(rest.shape)} from token {rest.start} on do not follow "
                f"{self.dtype} {list(self.shape)} that end at {self.end}"
            )
        between = np.zeros((gap, *self.shape[1:]), self.dtype)
        missing = (*self.missing, *([(self.end, rest.start)] if gap else ()), *rest.missing)
        return RoutedExperts.of(np.concatenate([self.rows(), between, rest.rows()]), self.start, missing)

    def until(self, end: int) -> "RoutedExperts":
        """Return a copy without the rows of token ``end`` and later ones."""
        if end >= self.end:
            return self
        end = max(end, self.start)
        missing = tuple((first, min(last, end)) for first, last in self.missing if first < end)
        return RoutedExperts.of(self.rows()[: end - self.start], self.start, missing)

    def without(self, first: int, end: int) -> "RoutedExperts":
        """Return a copy in which the rows of tokens [first, end) are missing."""
        first, end = max(first, self.start), min(end, self.end)
        if first >= end:
            return self
        rows = self.rows().copy()
        rows[first - self.start : end - self.start] = 0
        return RoutedExperts.of(rows, self.start, (*self.missing, (first, end)))
