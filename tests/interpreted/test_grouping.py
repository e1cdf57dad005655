"""The grouping kernels, run by Triton's interpreter: what they find, and that a sequence still sees its own tokens."""

import random

import pytest
import torch

from rollout_service.engine.attention.grouping import MAX_SEQUENCES, Grouping
from tests.support.shared_pages import Batch, batch_of, expected_groups, found_groups

CPU = torch.device("cpu")
PROMPT = [f"prompt {i}" for i in range(4)]
OTHER = [f"other {i}" for i in range(4)]


def check(batch: Batch, chunk: int = 4, min_pages: int = 1) -> set[tuple[tuple[int, ...], int]]:
    """What is found, which is what was to be found."""
    sequences, pages = batch.tables.shape
    made = Grouping(sequences, pages, batch.page, chunk, min_pages, CPU).group(batch.tables, batch.lengths)
    found = found_groups(batch, made)
    assert found == expected_groups(batch, chunk, min_pages)
    return found


def test_what_saves_most_is_shared_and_not_what_is_deepest():
    """Multi-turn sessions of one task: all have its prompt, and some have more in common."""
    deeper = [*PROMPT, "turn"]
    batch = batch_of([(deeper, 5), (deeper, 9), *[([*PROMPT, f"turn {i}"], 7) for i in range(6)]])
    assert check(batch, chunk=8) == {(tuple(range(8)), 4)}
    much_deeper = [*PROMPT, *(f"turn {i}" for i in range(8))]
    batch = batch_of([(much_deeper, 5), (much_deeper, 9), (PROMPT, 7), (PROMPT, 40)])
    assert check(batch, chunk=8) == {((0, 1), 12), ((2, 3), 4)}
    assert check(batch, chunk=8, min_pages=5) == {((0, 1), 12)}
    batch = batch_of([([*PROMPT, "a", "b"], 5), ([*PROMPT, "a", "b"], 9), *[(PROMPT, 7)] * 7])
    # more sharers than a chunk has do not make a prefix better, and one that is left over stays alone
    assert check(batch, chunk=2) == {((0, 1), 6), ((2, 3), 4), ((4, 5), 4), ((6, 7), 4)}


@pytest.mark.parametrize(("owns", "depth"), [((0, 0), 3), ((0, 20), 3), ((20, 0), 3), ((1, 16), 4)])
def test_the_page_that_is_written_now_is_never_shared(owns, depth):
    """With 0, what is decoded is the last token of a prompt that the cache has whole."""
    assert check(batch_of([(PROMPT, own) for own in owns])) == {((0, 1), depth)}


def test_members_need_not_be_adjacent_and_padding_is_no_sequence():
    batch = batch_of([(PROMPT, 5), (OTHER, 9), (PROMPT, 20), ([], 70), (OTHER, 33), (PROMPT, 1)], padding=3)
    assert check(batch) == {((0, 2, 5), 4), ((1, 4), 4)}
    assert check(Batch(16, torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, dtype=torch.int32))) == set()


def test_block_0_is_never_shared():
    """Profiling runs of vLLM have lengths without blocks."""
    batch = Batch(16, torch.zeros(3, 8, dtype=torch.int32), torch.full((3,), 100, dtype=torch.int32))
    made = Grouping(3, 8, 16, 4, 1, CPU).group(batch.tables, batch.lengths)
    assert found_groups(batch, made) == set()
    assert made.starts[-1] == 3


@pytest.mark.parametrize("seed", range(8))
def test_random_trees_of_prompts(seed):
    choose = random.Random(seed)
    page, chunk, min_pages = choose.choice([4, 16, 64]), choose.choice([2, 3, 4]), choose.choice([1, 1, 3])
    branches = [[f"{choose.randrange(2)}" for _ in range(choose.randrange(1, 7))] for _ in range(4)]
    paths = [["/".join(branch[: i + 1]) for i in range(len(branch))] for branch in branches]
    sequences = [(choose.choice(paths), choose.randrange(1, 3 * page)) for _ in range(choose.randrange(2, 10))]
    check(batch_of(sequences, page, padding=choose.randrange(3)), chunk, min_pages)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_were_computed_twice_in_part_are_never_mixed_up(seed):
    """Equal block ids at a depth then do not mean equal ids before it: each sequence still sees its own pages."""
    choose = random.Random(seed)
    batch = batch_of([(PROMPT, choose.randrange(1, 40)) for _ in range(7)])
    for sequence in range(7):
        if choose.random() < 0.6:
            batch.tables[sequence, choose.randrange(4)] = 1000 + sequence % 2
    made = Grouping(7, batch.tables.shape[1], 16, 4, 1, CPU).group(batch.tables, batch.lengths)
    found_groups(batch, made)


def test_buffers_serve_smaller_batches_after_larger_ones():
    """As CUDA graphs of several sizes do: all of them read the same addresses."""
    grouping = Grouping(8, 12, 16, 4, 1, CPU)
    addresses = set()
    for batch in (
        batch_of([(PROMPT, 90)] * 8, width=12),
        batch_of([(OTHER, 5), (OTHER, 6), ([], 9)], width=12),
        batch_of([([], 33)] * 2, width=12),
    ):
        made = grouping.group(batch.tables, batch.lengths)
        assert found_groups(batch, made) == expected_groups(batch, 4, 1)
        addresses.add((made.starts.data_ptr(), made.tables.data_ptr(), made.own_rows.data_ptr()))
    assert len(addresses) == 1


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=f"groups are found among at most {MAX_SEQUENCES} sequences"):
        Grouping(MAX_SEQUENCES + 1, 8, 16, 4, 1, CPU)
    with pytest.raises(ValueError, match="chunks of 1 sequences"):
        Grouping(4, 8, 16, 1, 1, CPU)
    grouping = Grouping(4, 8, 16, 4, 1, CPU)
    with pytest.raises(ValueError, match="5 sequences of 8 pages, and there are buffers for 4 of 8"):
        grouping.group(torch.zeros(5, 8, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))


def test_what_is_read_and_what_is_not_is_counted():
    """Asked outside of the inference mode that buffers are made in."""
    with torch.inference_mode():
        grouping = Grouping(8, 12, 16, 4, 1, CPU)
    assert grouping.reads.read() == (0, 0)
    first = batch_of([(PROMPT, 5)] * 3 + [([], 9)], width=12, padding=2)  # two of three read no prompt of 64 tokens
    grouping.group(first.tables, first.lengths)
    assert grouping.reads.read() == (0, 0)  # and a copy is queued
    first.tables[2, 0] = 1000  # one that does not have the pages after all, which spares nothing
    made = grouping.group(first.tables, first.lengths)
    assert int((made.shared_rows >= 0).sum()) == 2
    assert grouping.reads.read() == (3 * 69 + 9, 2 * 64)
    assert grouping.reads.read() == (2 * (3 * 69 + 9), 3 * 64)
