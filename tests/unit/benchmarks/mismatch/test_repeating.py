"""What the small models of some benchmarks are trained on."""

import torch

from benchmarks.mismatch.repeating import PERIOD, repeating


def test_sequences_repeat_their_beginning() -> None:
    sequences = repeating(3, seed=1, tokens=40)
    assert sequences.shape == (3, 40)
    assert torch.equal(sequences[:, PERIOD:], sequences[:, :-PERIOD])
    assert not torch.equal(sequences[0], sequences[1])
