"""A task whose answers take steps: numbers are added one after the other, digit by digit, all written out.

Only the end of an answer decides the reward, so one wrong token in the middle costs all of it. An answer of ``SHORT``
has 70 to 290 tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

DIGITS = 4  # of every number, with leading zeros
_NAMES = "abcdefghijklmnopqrst"
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Size:
    """How many numbers are added."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if not 2 <= self.fewest <= self.most <= len(_NAMES):
            raise ValueError(f"{self.fewest} to {self.most} numbers: give 2 to {len(_NAMES)}")

    @property
    def max_tokens(self) -> int:
        """The limit of an answer, its end included; a right one is shorter."""
        return 20 + 60 * (self.most - 1)


SHORT = Size(2, 6)
MAX_TOKENS = SHORT.max_tokens


@dataclass(frozen=True)
class Problem:
    """Some numbers whose sum has ``DIGITS`` digits at most."""

    numbers: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.numbers)

    @property
    def question(self) -> str:
        named = [f"{name}={number:0{DIGITS}}" for name, number in zip(_NAMES, self.numbers, strict=False)]
        return f"{' '.join(named)}\nWhat is {'+'.join(_NAMES[: len(named)])}?"

    @property
    def answer(self) -> str:
        """Return the right answer as Qwen3 writes one: its thoughts, then the sum."""
        thoughts, total = list[str](), self.numbers[0]
        for name, number in zip(_NAMES[1:], self.numbers[1:], strict=False):
            thoughts.append(f"{name} {_addition(total, number)}")
            total += number
        return "\n".join(["<think>", *thoughts, _END_OF_THOUGHT, "", f"{total:0{DIGITS}}"])


def _addition(left: int, right: int) -> str:
    """Return the addition written out: from the last digit to the first, each with the carry from the one before."""
    columns, carry = list[str](), 0
    for place in range(DIGITS):
        a, b = (number // 10**place % 10 for number in (left, right))
        columns.append(f"{a}+{b}+{carry}={a + b + carry:02}")
        carry = (a + b + carry) // 10
    return f"{left:0{DIGITS}}+{right:0{DIGITS}} {' '.join(columns)} {left + right:0{DIGITS}}"


def problems(seed: int, size: Size = SHORT) -> Iterator[Problem]:
    """Yield random problems without end, the same for a seed."""
    rng = random.Random(seed)
    while True:
        yield draw(rng, size)


def draw(rng: random.Random, size: Size) -> Problem:
    count = rng.randint(size.fewest, size.most)
    return Problem(tuple(rng.randrange(10**DIGITS // count) for _ in range(count)))


def reward(answer: str, total: int) -> float:
    """Return 1 if what comes after the thoughts is the sum, else 0."""
    return float(answer.rpartition(_END_OF_THOUGHT)[2].strip() == f"{total:0{DIGITS}}")
