"""Tokens on which a replica measures q, k and v."""

import json
import random
from collections import deque
from pathlib import Path

from rollout_service.protocol.rollout import Rollout

MAX_SEQUENCES, MAX_TOKENS = 16, 256
"""Maximum number of sequences that are measured at once, and length in tokens of each, from its first token on."""
_RANDOM_TOKENS = 64
"""Length in tokens of each random sequence."""


class CalibrationBatch:
    """Given prompts, else the newest rollouts of this replica, else random tokens."""

    def __init__(self, prompts: Path | None, vocab_size: int, max_model_len: int) -> None:
        """``prompts``: ``kv_cache.calibration_prompts``. Raises FileNotFoundError, or ValueError with the line, for
        invalid ones."""
        self._longest = min(MAX_TOKENS, max_model_len)
        self._random = _random_sequences(MAX_SEQUENCES, min(_RANDOM_TOKENS, self._longest), vocab_size)
        self._recent: deque[list[int]] = deque(maxlen=MAX_SEQUENCES)
        self._given: list[list[int]] = []
        if prompts is not None:
            given = read_prompts(prompts, vocab_size)
            self._given = [sequence[: self._longest] for sequence in given[:MAX_SEQUENCES]]

    def add(self, rollout: Rollout) -> None:
        """Keep the prompt and the first completion of a rollout, up to the maximum length."""
        sequence = [*rollout.prompt_token_ids[: self._longest], *rollout.completions[0].token_ids][: self._longest]
        if not self._given and len(sequence) > 1:
            self._recent.append(sequence)

    @property
    def origin(self) -> str:
        """Return the origin of the tokens, in words."""
        return "given prompts" if self._given else "recent rollouts" if self._recent else "random tokens"

    def sequences(self) -> list[list[int]]:
        """Return the token ids, a list for each sequence."""
        return self._given or list(self._recent) or self._random


def read_prompts(path: Path, vocab_size: int) -> list[list[int]]:
    """Read token ids from a file with a JSON list on each line. Raises FileNotFoundError, or ValueError with the
    line."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            ids = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}: {error}: each line is a JSON list of token ids") from error
        if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise ValueError(
                f"{path}, line {number}: each line is a JSON list of two token ids at least, from 0 to {vocab_size - 1}"
            )
        found.append(ids)
    if not found:
        raise ValueError(f"{path} has no prompts: leave kv_cache.calibration_prompts out to use recent rollouts")
    return found


def _random_sequences(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    chosen = random.Random(0)
    return [[chosen.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]
