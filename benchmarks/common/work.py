"""What engines and services are asked for: groups of completions of one prompt, all at once."""

from dataclasses import dataclass

import torch

from benchmarks.common.command import Options
from benchmarks.common.results import Json
from rollout_service.protocol.sampling import Sampling

PUBLISHED = range(1000, 150_000)
"""Token ids that the published shapes have."""


@dataclass(frozen=True)
class Work:
    """``n`` completions of ``out`` tokens of each prompt."""

    prompts: list[list[int]]
    n: int
    out: int

    @property
    def sampling(self) -> Sampling:
        """Of each prompt's request: temperature 1, no end of sequence."""
        return Sampling(n=self.n, max_tokens=self.out, ignore_eos=True)

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return len(self.prompts) * self.n * self.out


class WorkOptions(Options):
    """The work."""

    groups: int = 16
    """Distinct prompts."""
    n: int = 16
    """Completions of each prompt."""
    prompt_min: int = 512
    """Tokens of the shortest prompt."""
    prompt_max: int = 512
    """Tokens of the longest prompt; lengths are spread evenly between them."""
    out: int = 512
    """Tokens of a completion."""

    @property
    def sequences(self) -> int:
        """Completions that are made at once."""
        return self.groups * self.n

    def make(self, seed: int = 0) -> Work:
        """Return prompts of random token ids."""
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.groups).int().tolist()
        return Work(random_prompts(lengths, seed), self.n, self.out)

    def as_json(self) -> Json:
        """As it stands in results."""
        prompt_tokens = [self.prompt_min, self.prompt_max]
        return {"groups": self.groups, "n": self.n, "prompt_tokens": prompt_tokens, "output_tokens": self.out}


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return one prompt of each length, always the same of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(PUBLISHED.start, PUBLISHED.stop, (length,), generator=generator).tolist() for length in lengths
    ]
