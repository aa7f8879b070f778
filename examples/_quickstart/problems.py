"""Arithmetic word problems, written to measure: each comes close to a wanted (prompt, completion) length.

A problem tells of a stock that changes day by day. Prompt and completion can each be made longer, so that the
lengths of a real data set can be had without its text:

    prompt      opening, background, one sentence per event ("On each of days 2 to 5, Mira sells 3 rolls.")
    completion  one line of arithmetic per day, some with an explanation or a check, then the answer

The number of days follows from the completion's length, the number of events from the prompt's. What is left
over is filled with optional sentences, each of them true, drawn in random order as long as one still fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

Count = Callable[[str], int]  # text -> number of tokens


@dataclass(frozen=True)
class Setting:
    """The story around the numbers, with `{name}` and `{n}` to fill in. Deeds follow "On day 3, "."""

    opening: str
    item: str
    place: str
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    background: tuple[str, ...]


SETTINGS = (
    Setting(
        "{name} runs a bakery.",
        "rolls",
        "on the shelf",
        ("{name} bakes {n} rolls", "the morning shift bakes {n} rolls"),
        ("{name} sells {n} rolls", "a school buys {n} rolls"),
        (
            "The oven is old but reliable.",
            "Each roll weighs about as much as an egg.",
            "The bakery opens before sunrise, because many people stop there on the way to work.",
            "Bread and cakes are counted on a separate list.",
            "Nobody eats from the shelf.",
        ),
    ),
    Setting(
        "{name} looks after a village library.",
        "books",
        "in the library",
        ("readers return {n} books", "{name} unpacks {n} new books"),
        ("readers borrow {n} books", "{name} lends {n} books to a school"),
        (
            "The reading room has a stove and two armchairs.",
            "Magazines do not count as books.",
            "A book may be kept for a month, and hardly anyone is late.",
            "A cat lives there.",
            "The catalogue is still a drawer full of paper cards, sorted by author.",
        ),
    ),
    Setting(
        "{name} has a stall at the apple market.",
        "crates",
        "at the stall",
        ("the farm delivers {n} crates", "{name} fetches {n} crates from the barn"),
        ("{name} sells {n} crates", "a cider maker collects {n} crates"),
        (
            "A full crate is heavy, so a cart is used to move it.",
            "The apples come from three old orchards on the far side of the river.",
            "Empty crates are not counted.",
            "The market is open every day.",
            "Most customers pay in cash.",
        ),
    ),
    Setting(
        "{name} repairs bicycles.",
        "bicycles",
        "in the workshop",
        ("customers bring in {n} bicycles", "the post office sends {n} bicycles"),
        ("{name} hands over {n} bicycles", "customers pick up {n} bicycles"),
        (
            "Most repairs are flat tires or worn brakes.",
            "The workshop lies in a quiet street behind the station.",
            "Spare parts arrive by train.",
            "A simple repair costs less than a new chain, and every customer gets a cup of tea.",
            "Scooters are sent elsewhere.",
        ),
    ),
    Setting(
        "{name} keeps hens.",
        "eggs",
        "in the pantry",
        ("{name} collects {n} eggs", "a neighbor brings {n} eggs"),
        ("{name} uses {n} eggs for cakes", "a hotel buys {n} eggs"),
        (
            "The hens live in a red house under the walnut tree.",
            "The hens like corn.",
            "Broken eggs never reach the pantry.",
            "The pantry is cool even in summer, so nothing in it spoils for a few weeks.",
            "Some of the eggs are brown, but the color makes no difference here.",
        ),
    ),
    Setting(
        "{name} makes pottery.",
        "bowls",
        "in the storeroom",
        ("{name} fires {n} bowls", "an apprentice brings {n} bowls"),
        ("a shop collects {n} bowls", "{name} sells {n} bowls"),
        (
            "Every bowl is glazed in blue or green.",
            "The clay comes from a pit nearby.",
            "Cups and plates have a room of their own, so they are left out of the count.",
            "The kiln needs a whole night to cool down.",
            "Visitors are welcome.",
        ),
    ),
)

NAMES = ("Mira", "Jonas", "Amara", "Tomas", "Leila", "Henrik", "Sofia", "Kofi", "Yuki", "Pavel", "Ines", "Omar")

BACKGROUND = (  # fits every setting
    "It is late spring.",
    "{name} writes everything down in a notebook.",
    "Nothing else changes.",
    "{name} has done this work for many years and enjoys it.",
    "The town has two churches, a bridge and a small square with a fountain.",
    "A cousin sometimes comes by to talk, but does not help with the work.",
    "The numbers below come from the notebook.",
    "In the evening everything is counted once more.",
    "The weather is mild.",
    "On some evenings there is music in the square, and the whole street stays up late to listen.",
)


@dataclass(frozen=True)
class Problem:
    """A question with its worked answer, and the numbers behind it."""

    prompt: str
    completion: str
    start: int
    changes: tuple[int, ...]  # one per day
    answer: int


@dataclass(frozen=True)
class Event:
    """The stock changes by `change` on each of the days `first..last`."""

    first: int
    last: int
    change: int
    deed: str

    def __str__(self) -> str:
        days = self.last - self.first + 1
        pattern = ("On day {0}", "On both day {0} and day {1}")[days - 1] if days < 3 else "On each of days {0} to {1}"
        return f"{pattern.format(self.first, self.last)}, {self.deed}."


def write_problems(
    lengths: Iterable[tuple[int, int]], count: Count, *, seed: int, prompt_extra: int = 0, completion_extra: int = 0
) -> Iterator[Problem]:
    """Write one problem for each (prompt, completion) length in tokens.

    Args:
        lengths: The wanted lengths.
        count: Counts the tokens of a text.
        seed: The same seed gives the same problems.
        prompt_extra: Tokens that a chat template will put around the prompt.
        completion_extra: Tokens that will follow the completion (its end mark).
    """
    rng = random.Random(seed)
    for prompt, completion in lengths:
        yield _write(rng, count, prompt - prompt_extra, completion - completion_extra)


def _write(rng: random.Random, count: Count, prompt_tokens: int, completion_tokens: int) -> Problem:
    setting, name, start = rng.choice(SETTINGS), rng.choice(NAMES), rng.randint(40, 180)
    opening = f"{setting.opening.format(name=name)} At first there are {start} {setting.item} {setting.place}."
    question = f"How many {setting.item} are there at the end?"
    # Between half and nearly all of the completion is arithmetic; explanations and checks get the rest.
    line = count(f"Day 1: {start} + 12 = {start + 12} {setting.item}.\n")
    days = max(1, int(rng.uniform(0.5, 0.9) * completion_tokens / line))
    sentence = f" On each of days 1 to 3, {max(setting.gain + setting.loss, key=len).format(name=name, n=12)}."
    room = (prompt_tokens - count(f"{opening} {question}")) // count(sentence)
    if room < 1:  # a very short prompt
        opening, question = f"{name} counts {start} {setting.item}.", "How many are there at the end?"
    events = list(_events(rng, setting, name, start, days, min(days, max(1, room))))

    body = [opening, *map(str, events), question]
    background = [text.format(name=name) for text in (*setting.background, *BACKGROUND)]
    spare = prompt_tokens - count(" ".join(body))
    chosen = _fill(rng, spare, [count(" " + text) for text in background])
    body[1:1] = [background[i] for i in chosen]

    changes = tuple(event.change for event in events for _ in range(event.first, event.last + 1))
    completion, answer = _solve(rng, count, start, changes, setting, completion_tokens)
    return Problem(" ".join(body), completion, start, changes, answer)


def _events(rng: random.Random, setting: Setting, name: str, stock: int, days: int, parts: int) -> Iterator[Event]:
    """Divide `days` days among `parts` events, none of which takes more than there is."""
    ends = [*sorted(rng.sample(range(1, days), parts - 1)), days]
    for first, last in zip([1, *(end + 1 for end in ends)], ends, strict=False):
        span = last - first + 1
        most = min(30, (stock - 1) // span)  # what can be taken every day
        gain = most < 2 or rng.random() < 0.5
        amount = rng.randint(2, 30 if gain else most)
        change = amount if gain else -amount
        deed = rng.choice(setting.gain if gain else setting.loss).format(name=name, n=amount)
        yield Event(first, last, change, deed)
        stock += change * span


def _solve(
    rng: random.Random, count: Count, start: int, changes: Sequence[int], setting: Setting, tokens: int
) -> tuple[str, int]:
    """The worked answer in about `tokens` tokens, and its number."""
    lines, remarks, stock = [], [], start
    for day, change in enumerate(changes, start=1):
        sign, undo, word = ("+", "-", "more") if change > 0 else ("-", "+", "fewer")
        before, amount, stock = stock, abs(change), stock + change
        lines.append(f"Day {day}: {before} {sign} {amount} = {stock} {setting.item}.")
        remarks.append(f" That is {amount} {word} than before.")
        remarks.append(f" Check: {stock} {undo} {amount} = {before}.")
    low, high = sorted((start, stock))
    closing = [
        f"Over {len(changes)} days the stock has changed by {high} - {low} = {high - low} {setting.item}.\n",
        f"No more changes follow, so this is the number of {setting.item} {setting.place}.\n",
    ]
    ends = [f"Answer: {stock}", f"The answer is {stock}.", f"At the end there are {stock} {setting.item}."]

    sizes = [count(text) for text in remarks + closing]
    spare = tokens - count("\n".join([*lines, ends[0]]))
    chosen = _fill(rng, spare, sizes)
    spare += count(ends[0]) - sum(sizes[i] for i in chosen)
    end = max((text for text in ends if count(text) <= spare), key=count, default=ends[0])
    worked = "\n".join(
        line + "".join(remarks[i] for i in (2 * day, 2 * day + 1) if i in chosen) for day, line in enumerate(lines)
    )
    closing = [text for i, text in enumerate(closing, start=len(remarks)) if i in chosen]
    return worked + "\n" + "".join(closing) + end, stock


def _fill(rng: random.Random, room: int, sizes: Sequence[int]) -> list[int]:
    """Indices, in ascending order, of randomly chosen pieces that together take up to `room`."""
    chosen = []
    for index in rng.sample(range(len(sizes)), len(sizes)):
        if sizes[index] <= room:
            room -= sizes[index]
            chosen.append(index)
    return sorted(chosen)
