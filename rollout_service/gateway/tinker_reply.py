"""A finished sample as the protobuf message ``SampleResponse`` of Tinker's SDK 0.38, the only form that it reads."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, Rollout
from rollout_service.protocol.tinker import Sample, Tensor

_STOP, _LENGTH = 0, 1
_FLOAT32 = 1
_NO_LOGPROB = -99999.0
"""Logprob of an empty cell of a top-k matrix, whose token id is 0."""
Candidates = Sequence[Sequence[Candidate]]
"""The most likely tokens of each position, in order."""


def sample_response(rollout: Rollout, asked: Sample) -> bytes:
    """Return the message."""
    parts = [_bytes(1, b"".join(_sequence(each, asked.topk_sample_logprobs))) for each in rollout.completions]
    first = rollout.completions[0]
    positions = len(rollout.prompt_token_ids)
    unscored = 1 if asked.prompt_logprobs_last_n is None else max(1, positions - asked.prompt_logprobs_last_n)
    prompt = np.full(positions, np.nan, "<f4")
    if first.scores is not None and asked.target_prompt_logprobs is not None:
        own, targets = _split(first.scores)
        prompt[1:] = own
        parts.append(_bytes(5, b"".join(_tensor(targets, asked.target_prompt_logprobs))))
    elif first.prompt_logprobs is not None:
        tokens = rollout.prompt_token_ids
        prompt[1:] = [_of(token, at or ()) for token, at in zip(tokens[1:], first.prompt_logprobs[1:], strict=True)]
    prompt[:unscored] = np.nan
    if asked.prompt_logprobs:
        parts.append(_bytes(2, prompt.tobytes()))
    if asked.topk_prompt_logprobs and first.prompt_logprobs is not None:
        rows = [() if at < unscored else (row or ())[1:] for at, row in enumerate(first.prompt_logprobs)]
        parts.append(_bytes(3, b"".join(_top(rows, asked.topk_prompt_logprobs))))
    return b"".join(parts)


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
