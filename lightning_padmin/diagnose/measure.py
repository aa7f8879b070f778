"""Lengths of rows from their columns: token ids, a mask, numbers, or text and chat through a tokenizer.

What cannot be a length is an error that names its row. It never becomes 0 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.diagnose.fields import Part
from lightning_padmin.diagnose.problems import DiagnoseError, needed, shown
from lightning_padmin.diagnose.tables import Chunk, Table

Ints: TypeAlias = NDArray[np.int64]
_MOST = 2**31 - 1


class _BadValue(Exception):
    """A value that is no length: its index in the chunk, itself, and what was expected."""

    def __init__(self, index: int, value: object, expected: str) -> None:
        self.index, self.value, self.expected = index, value, expected


def measured(
    table: Table, parts: Sequence[Part], tokenizer: Any, skip_empty: bool = False
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Reads a table chunk by chunk.

    Args:
        table: where the rows are.
        parts: one per length of a row: the whole row, or prompt and completion.
        tokenizer: of transformers; None if no part has text.
        skip_empty: leave out rows of 0 tokens, which are an error otherwise.

    Yields:
        (rows, parts) int32 lengths in tokens, and how many rows were left out.

    Raises:
        DiagnoseError: a row cannot be measured; names file, line or row, column, value and fix.
    """
    fields = list(dict.fromkeys(field for part in parts for field in part.fields))
    for chunk in table.chunks(fields):
        columns = [_lengths(table, chunk, part, tokenizer) for part in parts]
        lengths = np.stack(columns, axis=1)
        # Those left out may still be wrong in another way.
        wrong = np.argwhere((lengths < (0 if skip_empty else 1)) | (lengths > _MOST))
        if len(wrong):
            row, part = wrong[0].tolist()
            raise DiagnoseError(_out_of_range(table.where(chunk.places[row]), parts[part], int(lengths[row, part])))
        keep = (lengths > 0).all(axis=1)
        yield lengths[keep].astype(np.int32), len(lengths) - int(keep.sum())


def _out_of_range(where: str, part: Part, length: int) -> str:
    if length > 0:
        return f"{where}: {part.named} is {length}, which is no length in tokens; use at most {_MOST}"
    if length < 0:
        return f"{where}: {part.named} is {length}, a negative length; correct the column"
    return (
        f"{where}: {part.named} has 0 tokens; correct the row or the column, or leave such rows out with --skip-empty"
    )


def _lengths(table: Table, chunk: Chunk, part: Part, tokenizer: Any) -> Ints:
    """(rows,) lengths of one part of each row of a chunk."""
    total = np.zeros(len(chunk.places), np.int64)
    try:
        if part.kind == "masked ids":
            return _masked(chunk.columns[part.fields[0]], chunk.columns[part.fields[1]])
        for field in part.fields:
            total += _of_column(chunk.columns[field], part, tokenizer, table.is_text)
    except _BadValue as bad:
        where = table.where(chunk.places[bad.index])
        raise DiagnoseError(f"{where}: {part.named} is {shown(bad.value)}, expected {bad.expected}") from None
    return total + part.extra


def _of_column(column: Any, part: Part, tokenizer: Any, is_text: bool) -> Ints:
    if hasattr(column, "to_pylist"):
        fast = _of_arrow(column, part.kind)
        if fast is not None:
            return fast
        column = column.to_pylist()
    if part.kind == "number":
        return _parsed(column) if is_text else _numbers(column)
    if part.kind == "ids":
        return np.array([_count(index, ids) for index, ids in enumerate(column)], np.int64)
    return _tokenized(column, part.kind, tokenizer)


def _of_arrow(column: Any, kind: str) -> Ints | None:
    """Lengths of a pyarrow column, without making Python objects of it; None where it has to be looked at closely."""
    compute, types = needed("pyarrow.compute", "this column"), needed("pyarrow.types", "this column")
    if column.null_count:
        return None
    if kind == "number" and types.is_integer(column.type) and not types.is_uint64(column.type):
        numbers: Ints = column.to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers
    if kind == "ids" and _is_list_of_integers(column.type, types):
        sizes: Ints = compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return sizes
    return None


def _is_list_of_integers(kind: Any, types: Any) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _masked(ids: Any, masks: Any) -> Ints:
    """Attended tokens: the sum of each mask, which must be as long as the ids."""
    if hasattr(ids, "to_pylist"):
        sums = _mask_sums(ids, masks)
        if sums is not None:
            return sums
        ids, masks = ids.to_pylist(), masks.to_pylist()
    found = np.zeros(len(ids), np.int64)
    for index, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        if _count(index, row) != _count(index, mask):
            raise _BadValue(index, mask, f"an attention_mask of {len(row)} values, as many as input_ids")
        if not set(mask) <= {0, 1}:
            raise _BadValue(index, mask, "an attention_mask of 0 and 1")
        found[index] = sum(mask)
    return found


def _mask_sums(ids: Any, masks: Any) -> Ints | None:
    """The same for pyarrow columns, without making Python objects; None where something has to be looked at closely."""
    sizes, wide = _of_arrow(ids, "ids"), _of_arrow(masks, "ids")
    if sizes is None or wide is None or (sizes != wide).any():
        return None
    values = masks.flatten()
    if values.null_count:
        return None
    flat = values.to_numpy(zero_copy_only=False)
    if ((flat != 0) & (flat != 1)).any():
        return None
    sums: Ints = np.diff(
        np.concatenate([[0], np.cumsum(flat, dtype=np.int64)])[np.concatenate([[0], np.cumsum(sizes)])]
    )
    return sums


def _count(index: int, ids: Any) -> int:
    """Number of token ids. Lists of lists and texts have a length too, which would be a wrong one."""
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _BadValue(index, ids, "a list of integers, token ids")
    return len(ids)


def _numbers(values: Sequence[Any]) -> Ints:
    if set(map(type, values)) != {int}:
        return np.array([_whole(index, value) for index, value in enumerate(values)], np.int64)
    try:
        return np.array(values, np.int64)
    except OverflowError:
        index = next(i for i, value in enumerate(values) if abs(value) > _MOST)
        raise _BadValue(index, values[index], f"a length in tokens, at most {_MOST}") from None


def _whole(index: int, value: Any) -> int:
    """An integer; 12.0 is one, true and "12" are none."""
    # A column of integers with gaps becomes one of floats in pandas.
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MOST:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        hint = " (to count the tokens of text, give --tokenizer)" if isinstance(value, str) else ""
        raise _BadValue(index, value, "a whole number of tokens" + hint)
    if abs(value) > _MOST:
        raise _BadValue(index, value, f"a length in tokens, at most {_MOST}")
    return value


def _parsed(values: Sequence[str]) -> Ints:
    try:
        return np.array(list(map(int, values)), np.int64)
    except (ValueError, OverflowError):
        return np.array([_whole(index, _number(value)) for index, value in enumerate(values)], np.int64)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _tokenized(values: Sequence[Any], kind: Literal["text", "chat text", "messages"] | str, tokenizer: Any) -> Ints:
    """Tokens of each text or chat; all of the chunk in one call, which a fast tokenizer runs in native code."""
    for index, value in enumerate(values):
        if kind != "messages" and not isinstance(value, str):
            raise _BadValue(index, value, "a text")
        if kind == "messages" and not is_chat(value):
            raise _BadValue(index, value, 'messages: a list of {"role": ..., "content": ...}')
    if kind in ("text", "completion text"):
        rows = tokenizer(list(values), add_special_tokens=kind == "text", return_attention_mask=False, verbose=False)
        return np.array([len(ids) for ids in rows["input_ids"]], np.int64)
    if kind == "chat text":
        values = [[{"role": "user", "content": value}] for value in values]
    try:
        texts = [
            # A chat that does not end with the assistant is a prompt: its answer's opening mark belongs to it.
            tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=chat[-1].get("role") != "assistant"
            )
            for chat in values
        ]
    except Exception as error:  # templates raise what they like
        raise DiagnoseError(f"the tokenizer's chat template refuses a chat: {shown(str(error))}") from error
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return np.array([len(ids) for ids in rows["input_ids"]], np.int64)


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)
