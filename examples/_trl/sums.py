"""Sums to learn from: problems, written answers, and a reward that can be checked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from datasets import Dataset

SYSTEM = "You calculate."  # the model's own is longer than the problems
PHRASES = (  # of different lengths, so that prompts differ too
    "Calculate {a} + {b}.",
    "What is {a} + {b}? Reply with the number only.",
    "{name} has {a} apples and buys {b} more. Calculate {a} + {b}, the number of apples that {name} has then.",
)
ANSWERS = (
    "{sum}",
    "{a} + {b} = {sum}",
    "The answer is {sum}.",
    "To find the answer, we add the two numbers: {a} + {b} = {sum}.",
    "We start with {a} and count on by {b} more, one after the other, so the result is {sum}.",
)
NAMES = ("Mira", "Jonas", "Leila", "Kofi", "Yuki", "Ines")


def problems(count: int, seed: int) -> list[tuple[str, int, int]]:
    """Questions with their two numbers, each from 1 to 9."""
    source, written = random.Random(seed), []
    for k in range(count):
        a, b = source.randint(1, 9), source.randint(1, 9)
        phrase = PHRASES[k % len(PHRASES)]  # in turn: some are harder, and rewards should be comparable
        written.append((phrase.format(a=a, b=b, name=source.choice(NAMES)), a, b))
    return written


def prompts(count: int, seed: int) -> Dataset:
    """Conversations of one question; `answer` goes to the reward."""
    rows = []
    for text, a, b in problems(count, seed):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        rows.append({"prompt": messages, "answer": a + b})
    return Dataset.from_list(rows)


def answers(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions with written answers, short and long, two in three of them right."""
    source = random.Random(seed)
    pairs = []
    for text, a, b in problems(count, seed):
        total = a + b + source.choice((0, 0, 1))
        pairs.append((text, source.choice(ANSWERS).format(a=a, b=b, sum=total)))
    return pairs


def reward(longest: int) -> Callable[..., list[float]]:
    """1 for the right number at the end, and up to 0.5 for being brief.

    The second part tells answers apart as long as none is right, and is lost where there is no end.

    Args:
        longest: tokens at which generation stops.
    """

    def right_and_brief(
        completions: Sequence[list[dict[str, str]]], completion_ids: Sequence[Sequence[int]], answer: Sequence[int], **_
    ) -> list[float]:
        values = []
        for messages, ids, wanted in zip(completions, completion_ids, answer, strict=True):
            numbers = re.findall(r"\d+", messages[0]["content"])
            right = bool(numbers) and int(numbers[-1]) == wanted
            values.append(float(right) + 0.5 * (1 - len(ids) / longest))
        return values

    return right_and_brief
