"""Prompts are as many and as long as asked for, and always the same."""

from benchmarks.common.work import PRINTABLE, WorkOptions


def test_lengths_are_spread_evenly() -> None:
    work = WorkOptions(groups=3, n=2, prompt_min=4, prompt_max=8, out=16).make(PRINTABLE)
    assert [len(prompt) for prompt in work.prompts] == [4, 6, 8]
    assert {token for prompt in work.prompts for token in prompt} <= set(PRINTABLE)
    assert work.tokens == 3 * 2 * 16
    assert (work.sampling.n, work.sampling.max_tokens, work.sampling.ignore_eos) == (2, 16, True)


def test_prompts_differ_and_are_the_same_every_time() -> None:
    first, again = (WorkOptions().make().prompts for _ in range(2))
    assert first == again
    assert len({tuple(prompt) for prompt in first}) == 16
