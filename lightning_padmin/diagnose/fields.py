"""Which columns of a table give the length of a row, as the user says or as the first row shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_padmin.diagnose.problems import DiagnoseError, shown
from lightning_padmin.diagnose.tables import Table
from lightning_padmin.printing import listed

_LENGTHS = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "tokens")
_PAIRS = (("prompt_tokens", "completion_tokens"), ("prompt_ids", "completion_ids"), ("prompt", "completion"))
_CHATS = ("messages", "conversations", "conversation")
_OPTIONS = "--length-column, --text-column with --tokenizer, or --prompt-field and --completion-field"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the user says of the columns; None and False: not said.

    Attributes:
        length: a column of lengths in tokens.
        text: columns of text, or of chat messages; the lengths of several are added.
        prompt, completion: columns of two parts of a row: token ids, lengths, text or messages.
        has_tokenizer: whether text can be measured.
        chat: prompts that are text go through the chat template, as one message of the user.
    """

    length: str | None = None
    text: Sequence[str] = ()
    prompt: str | None = None
    completion: str | None = None
    has_tokenizer: bool = False
    chat: bool = False


@dataclass(frozen=True)
class Part:
    """One length of every row.

    Attributes:
        fields: the columns it is made of.
        kind: "number", "ids", "masked ids", "text", "chat text", "completion text" or "messages".
        extra: tokens that are added to each.
    """

    fields: tuple[str, ...]
    kind: str
    extra: int = 0

    @property
    def named(self) -> str:
        """The columns, for messages."""
        return " + ".join(self.fields)


def choose_parts(table: Table, columns: Columns, has_end_mark: bool = False) -> tuple[Part, ...]:
    """One part (the whole row) or two (prompt and completion).

    Args:
        table: where the rows are.
        columns: what the user says.
        has_end_mark: the tokenizer has an end mark, which is counted after completions of text.

    Raises:
        DiagnoseError: a column is not there, has no kind of value that has a length, or none is known.
    """
    if (columns.prompt is None) != (columns.completion is None):
        raise DiagnoseError("--prompt-field and --completion-field go together; for one length per row name its column")
    said = [bool(columns.length), bool(columns.text), bool(columns.prompt)]
    if sum(said) > 1:
        raise DiagnoseError(f"more than one kind of column was named; use one of {_OPTIONS}")
    if columns.prompt is not None and columns.completion is not None:
        return _pair(table, columns.prompt, columns.completion, columns, has_end_mark)
    if columns.length:
        return (Part((columns.length,), _demand(table, columns.length, columns, ("number",), "--length-column")),)
    if columns.text:
        kinds = {_demand(table, each, columns, ("text", "messages"), "--text-column") for each in columns.text}
        if len(kinds) > 1:
            raise DiagnoseError(f"--text-column: {', '.join(columns.text)} are text and messages; name one kind")
        return (Part(tuple(columns.text), kinds.pop()),)
    return _known(table, columns, has_end_mark)


def _known(table: Table, columns: Columns, has_end_mark: bool) -> tuple[Part, ...]:
    """Columns with well-known names."""
    there = table.first
    if "input_ids" in there:
        kind = _demand(table, "input_ids", columns, ("ids",), "the column")
        has_mask = isinstance(there.get("attention_mask"), list)
        return (Part(("input_ids", "attention_mask"), "masked ids") if has_mask else Part(("input_ids",), kind),)
    for name in _LENGTHS:
        if name in there and _kind(table, name, columns) == "number":
            return (Part((name,), "number"),)
    for prompt, completion in _PAIRS:
        if prompt in there and completion in there:
            return _pair(table, prompt, completion, columns, has_end_mark)
    for name in (*_CHATS, "text"):
        if name in there:
            return (Part((name,), _demand(table, name, columns, ("text", "messages"), "the column")),)
    raise DiagnoseError(f"{table.source}: none of the columns {listed(there)} is known; name one with {_OPTIONS}")


def _pair(table: Table, prompt: str, completion: str, columns: Columns, has_end_mark: bool) -> tuple[Part, ...]:
    kinds = ("number", "ids", "text", "messages")
    first = _demand(table, prompt, columns, kinds, "--prompt-field")
    second = _demand(table, completion, columns, kinds, "--completion-field")
    if first == "text" and columns.chat:
        first = "chat text"
    is_text = second == "text"
    return Part((prompt,), first), Part(
        (completion,), "completion text" if is_text else second, int(is_text and has_end_mark)
    )


def _demand(table: Table, field: str, columns: Columns, kinds: Sequence[str], option: str) -> str:
    if field not in table.first:
        raise DiagnoseError(f"{option} {field}: {table.source} has no such column, it has {listed(table.first)}")
    kind = _kind(table, field, columns)
    if kind in ("text", "messages") and kind in kinds and not columns.has_tokenizer:
        raise DiagnoseError(f"{table.source}: {field} is {kind}; --tokenizer MODEL is needed to count its tokens")
    if kind not in kinds:
        value = shown(table.first[field])
        raise DiagnoseError(f"{option} {field}: {table.source} has {value} in its first row, expected {_words(kinds)}")
    return kind


def _words(kinds: Sequence[str]) -> str:
    names = {"number": "a whole number", "ids": "token ids", "text": "text", "messages": "chat messages"}
    return " or ".join(names[kind] for kind in kinds)


def _kind(table: Table, field: str, columns: Columns) -> str:
    """What the first row has in a column; a wrong value of the right kind is left to the reading, which names rows."""
    value: Any = table.first[field]
    if isinstance(value, str):
        if not table.is_text or field in columns.text:
            return "text"
        # In a CSV file everything is text, and "42" may be an answer.
        is_answer = columns.has_tokenizer and field in (columns.prompt, columns.completion)
        return "text" if is_answer or (columns.has_tokenizer and not _looks_like_number(value)) else "number"
    if isinstance(value, list):
        return "messages" if any(isinstance(each, dict) for each in value) else "ids"
    return "number"


def _looks_like_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
