"""A progress bar on standard error: only on a terminal, and only if rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how much is done.

    Args:
        name: what is being done.
        total: how much there is to do; None: not known.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    bar: Any = Progress(console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(escape(name), total=total)
        yield lambda done: bar.update(task, completed=done)
