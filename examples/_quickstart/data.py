"""Rows to train on: from the user's file, or written by the example with the token lengths of GSM8K.

`examples/data/gsm8k_token_lengths.csv` holds 512 (prompt, completion) lengths in SmolLM2 tokens, chat
template and end mark included: a stratified sample of GSM8K's 7,473 training problems, without their text.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .arguments import BadInput
from .problems import write_problems

LENGTHS_FILE = Path(__file__).parents[1] / "data" / "gsm8k_token_lengths.csv"
IGNORED = -100  # the label of a token that carries no loss

Pair = tuple[str, str]  # prompt, completion
T = TypeVar("T")


class Row(TypedDict):
    """One tokenized example. Prompt tokens are labelled `IGNORED`."""

    input_ids: list[int]
    labels: list[int]


def make_rows(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Put each prompt through the chat template and append its completion and the end mark."""
    rows = []
    for prompt, completion in pairs:
        before = _tokenize(tokenizer, _chat(tokenizer, prompt))
        after = _tokenize(tokenizer, completion + tokenizer.eos_token)
        rows.append(Row(input_ids=before + after, labels=[IGNORED] * len(before) + after))
    return rows


def written_pairs(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Pair]:
    """Write `count` arithmetic problems whose token lengths are drawn from `LENGTHS_FILE`."""
    problems = write_problems(
        draw(read_lengths(), count, seed),
        lambda text: len(_tokenize(tokenizer, text)),
        seed=seed,
        prompt_extra=len(_tokenize(tokenizer, _chat(tokenizer, ""))),
        completion_extra=1,
    )
    return [(problem.prompt, problem.completion) for problem in problems]


def read_lengths(path: Path = LENGTHS_FILE) -> list[tuple[int, int]]:
    """The (prompt, completion) token lengths of a CSV file with one header line."""
    with path.open(newline="") as file:
        return [(int(prompt), int(completion)) for prompt, completion in list(csv.reader(file))[1:]]


def read_pairs(path: Path, prompt_field: str, completion_field: str) -> list[Pair]:
    """Read one pair from each line of a JSON-lines file.

    Raises:
        BadInput: The file is missing or empty, or a line is not an object with two texts in these fields.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--data {path}: cannot be read ({reason}); name a JSON-lines file.") from error
    pairs = [
        _read_line(line, f"--data {path}, line {number}", prompt_field, completion_field)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not pairs:
        raise BadInput(f"--data {path}: the file is empty; give one JSON object per line.")
    return pairs


def _read_line(line: str, where: str, prompt_field: str, completion_field: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error}); give one JSON object per line.") from error
    if not isinstance(record, dict):
        raise BadInput(f"{where}: a JSON {type(record).__name__}; give one JSON object per line.")
    texts = []
    for option, field in (("--prompt-field", prompt_field), ("--completion-field", completion_field)):
        if field not in record:
            raise BadInput(f"{option} {field}: {where} has no such field; it has {', '.join(record) or 'none'}.")
        if not isinstance(text := record[field], str) or not text.strip():
            raise BadInput(f"{option} {field}: {where} holds {text!r:.40}; name a field with text in every line.")
        texts.append(text)
    return texts[0], texts[1]


def draw(items: Sequence[T], count: int, seed: int) -> list[T]:
    """`count` items in random order; none comes again before all have come."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < count:
        drawn.extend(rng.sample(items, len(items)))
    return drawn[:count]


def right_pad(pad_token_id: int) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
    """A collate function that pads each batch to its longest row, on the right."""

    def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows)

        def stack(values: Sequence[list[int]], fill: int) -> Tensor:
            return torch.tensor([value + [fill] * (width - len(value)) for value in values])

        return {
            "input_ids": stack([row["input_ids"] for row in rows], pad_token_id),
            "attention_mask": stack([[1] * len(row["input_ids"]) for row in rows], 0),
            "labels": stack([row["labels"] for row in rows], IGNORED),
        }

    return collate


def _chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
