"""A finished sample as the protobuf message ``SampleResponse`` of Tinker's SDK 0.38, the only form that it reads."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollout_service.errors import NotReady
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.tinker import Sample, Tensor

_STOP, _LENGTH = 0, 1
_FLOAT32 = 1
_NO_LOGPROB = -99999.0
"""Logprob of an empty cell of a top-k matrix, whose token id is 0."""
Candidates = Sequence[Sequence[Candidate]]
"""The most likely tokens of each position, in order."""
_Found = TypeVar("_Found")


def sample_response(rollout: Rollout, asked: Sample) -> bytes:
    """Return the message. Raises NotReady if no completion came with the prompt's logprobs, which were asked for."""
    parts = [_bytes(1, b"".join(_sequence(each, asked.topk_sample_logprobs))) for each in rollout.completions]
    tokens = rollout.prompt_token_ids
    positions = len(tokens)
    unscored = 1 if asked.prompt_logprobs_last_n is None else max(1, positions - asked.prompt_logprobs_last_n)
    prompt, rows = np.full(positions, np.nan, "<f4"), list[Sequence[Candidate]]()
    if asked.target_prompt_logprobs is not None:
        prompt[1:], targets = _split(_first(rollout, (each.scores for each in rollout.completions)))
        parts.append(_bytes(5, b"".join(_tensor(targets, asked.target_prompt_logprobs))))
    elif asked.prompt_logprobs or asked.topk_prompt_logprobs:
        rows = [at or () for at in _first(rollout, (each.prompt_logprobs for each in rollout.completions))]
        prompt[1:] = [_of(token, row) for token, row in zip(tokens[1:], rows[1:], strict=True)]
    prompt[:unscored] = np.nan
    if asked.prompt_logprobs:
        parts.append(_bytes(2, prompt.tobytes()))
    if asked.topk_prompt_logprobs:
        rows = [() if at < unscored else row[1:] for at, row in enumerate(rows)]
        parts.append(_bytes(3, b"".join(_top(rows, asked.topk_prompt_logprobs))))
    return b"".join(parts)


def _first(rollout: Rollout, found: Iterable[_Found | None]) -> _Found:
    """Return the first that is there: a completion whose replica was lost has no logprobs of the prompt."""
    for each in found:
        if each is not None:
            return each
    raise NotReady(f"{rollout.request_id} lost its replica after the prompt was scored: send it again")


def _sequence(completion: Completion, top: int) -> Iterator[bytes]:
    # Tinker has no other reason for a completion that was cut short
    yield _number(1, _STOP if completion.finish_reason == "stop" else _LENGTH)
    yield _bytes(2, np.asarray(completion.token_ids, "<i4").tobytes())
    yield _bytes(3, np.asarray(completion.logprobs, "<f4").tobytes())
    if top and completion.top_logprobs is not None:
        yield _bytes(4, b"".join(_top(completion.top_logprobs, top)))


def _top(rows: Candidates, top: int) -> Iterator[bytes]:
    ids, logprobs = np.zeros((len(rows), top), "<i4"), np.full((len(rows), top), _NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        likeliest = row[:top]
        ids[at, : len(likeliest)] = [each.token_id for each in likeliest]
        logprobs[at, : len(likeliest)] = [each.logprob for each in likeliest]
    yield from (_bytes(1, ids.tobytes()), _bytes(2, logprobs.tobytes()), _number(3, top), _number(4, len(rows)))


def _of(token: int, candidates: Iterable[Candidate]) -> float:
    return next(each.logprob for each in candidates if each.token_id == token)


def _split(scores: CompactLogprobs) -> tuple[npt.NDArray[np.float32], list[float]]:
    """Return the logprobs of the prompt's tokens, which come first at each position, and those of the targets."""
    _, logprobs = scores.unpacked()
    rows = [logprobs[a:b] for a, b in pairwise(scores.offsets)]
    return np.array([row[0] for row in rows], "<f4"), [float(each) for row in rows for each in row[1:]]


def _tensor(logprobs: list[float], asked: Tensor) -> Iterator[bytes]:
    """Return the logprobs in the layout of the ids that were asked for; 0 where there was none."""
    values, wanted = np.zeros(len(asked.data), "<f4"), np.asarray(asked.data, np.int64) != -1
    values[wanted] = logprobs
    if asked.sparse_crow_indices is None or asked.sparse_col_indices is None:
        yield _bytes(1, values.tobytes())
    else:
        indices = (np.asarray(each, "<i8") for each in (asked.sparse_crow_indices, asked.sparse_col_indices))
        crow, col = (each.tobytes() for each in indices)
        yield _bytes(2, _bytes(1, values.tobytes()) + _bytes(2, crow) + _bytes(3, col))
    yield _number(3, _FLOAT32)
    yield _bytes(4, b"".join(map(_varint, asked.shape)))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Return a number in protobuf's variable length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
