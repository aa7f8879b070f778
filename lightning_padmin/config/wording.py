"""Messages for people who have set options as `PADMIN_*` variables and wrote no Python: keywords become variables.

use PadMinConfig(enabled=False)            use PADMIN_ENABLED=false
declare batch_schema={'x': 'row'}          declare PADMIN_BATCH_SCHEMA='{"x": "row"}'
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

from lightning_padmin.config.environment import PREFIX, as_variables
from lightning_padmin.config.options import option_names

_KEYWORD = re.compile(rf"(?<![\w.\[])({'|'.join(sorted(option_names(), key=len, reverse=True))})=(?!=)")
_PLAIN = re.compile(r"'[^']*'|\"[^\"]*\"|[\w-]+")
_WRAPPED = re.compile(r"(?:padmin=)?PadMin(?:Config|Callback)\((PADMIN_[^()]*)\)")
_FIELD = re.compile(r"Field\(([^()]*)\)")
# Names that mean nothing else; others ("mode", "check") are words too.
_UNMISTAKABLE = re.compile(rf"(?<![\w.'\"])({'|'.join(name for name in option_names() if '_' in name)})(?![\w=\[])")
_PAIRS = {"{": "}", "[": "]", "(": ")"}


def in_variables(text: str) -> str:
    """The same message with options as environment variables; what no variable can say stays as it is."""
    parts, end = [], 0
    for match in _KEYWORD.finditer(text):
        if match.start() < end:
            continue
        stop = _end_of_value(text, match.end())
        variable = _variable(match[1], text[match.end() : stop])
        if variable is not None:
            parts += [text[end : match.start()], variable]
            end = stop
    changed = "".join([*parts, text[end:]])
    changed = _WRAPPED.sub(lambda match: match[1].replace(", PADMIN_", " PADMIN_"), changed)
    left = [PREFIX + name.upper() for name in dict.fromkeys(_UNMISTAKABLE.findall(changed))]
    missing = [name for name in left if name not in changed]
    return f"{changed} (options are variables here: {', '.join(missing)})" if missing else changed


def _end_of_value(text: str, start: int) -> int:
    """Where the value that begins at `start` ends."""
    if start < len(text) and text[start] in _PAIRS:
        expected: list[str] = []
        for place in range(start, len(text)):
            if text[place] in _PAIRS:
                expected.append(_PAIRS[text[place]])
            elif expected and text[place] == expected[-1]:
                expected.pop()
                if not expected:
                    return place + 1
    match = _PLAIN.match(text, start)
    return match.end() if match else start


def _variable(name: str, text: str) -> str | None:
    as_mapping = _FIELD.sub(lambda match: _field(match[1]), text)
    try:
        value = ast.literal_eval(as_mapping)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if isinstance(value, dict | set):
        value = json.loads(json.dumps(value, default=_written))
    try:
        ((variable, written),) = as_variables({name: value}).items()
    except (TypeError, ValueError):
        return None
    return f"{variable}={shlex.quote(written)}"


def _field(arguments: str) -> str:
    """`'position', fill=...` as a mapping."""
    pairs = [part.strip() for part in arguments.split(",") if part.strip()]
    if pairs == ["..."]:
        return "'...'"
    named = [pair if "=" in pair else f"kind={pair}" for pair in pairs]
    return "{" + ", ".join(f"'{pair.partition('=')[0]}': {pair.partition('=')[2]}" for pair in named) + "}"


def _written(value: Any) -> Any:
    return "..." if value is ... else sorted(map(str, value)) if isinstance(value, set) else str(value)
