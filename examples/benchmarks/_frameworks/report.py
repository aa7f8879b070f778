"""The tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from .parts import PARTS
from .turns import BEYOND

TITLES = {"lightning": "Lightning", "trl": "TRL GRPO", "accelerate": "Accelerate"}
_COUNTED = (
    "Peak: all that is allocated in a turn, so not weights and the loader's batches, which were there before; but ours "
    "includes the micro-batch that is gathered from one, and TRL's the batch that was generated meanwhile."
)


def steps(found: Sequence[dict[str, Any]], clock: str) -> Table:
    """A line for stock and one for ours."""
    unit = "seconds" if clock == "wall" else "CPU s"
    table = Table(Column("a step of", no_wrap=True))
    for name in (f"{unit}\n(median)", "times\nas fast", "slots", "real/\nslots", "micro-\nbatches", "overhead"):
        table.add_column(name, justify="right")
    for name in ("first-batch\ncheck, s", "peak\nMB", "gradient\ndiff."):
        table.add_column(name, justify="right")
    for each in found:
        memory, title = each["memory"], TITLES[each["framework"]]
        for who, seconds in (("stock", each["stock_seconds"]), ("ours", each["our_seconds"])):
            size, ours = each["sizes"][who], who == "ours"
            table.add_row(
                f"{title}, {'with padmin' if ours else 'stock'}",
                f"{seconds:.3f}",
                f"{each['times_as_fast']:.2f}" if ours else "",
                f"{size['slots']:,.0f}",
                f"{size['real'] / size['slots']:.2f}",
                f"{size['micro_batches']:.1f}",
                f"{each['overhead']:.2%}" if ours else "",
                f"{each['check_seconds']:.2f}" if ours and each["check_seconds"] else "",
                f"{memory[who] / 1e6:,.1f}" if memory else "",
                f"{each['largest_gradient_difference']:.0e}" if ours else "",
                end_section=ours,
            )
    return table


def parts(found: Sequence[dict[str, Any]]) -> Table:
    """The library's own time."""
    table = Table(Column("own time in a step, ms", no_wrap=True))
    for each in found:
        table.add_column(TITLES[each["framework"]], justify="right")
    for part in (*PARTS, BEYOND):
        table.add_row(part, *(f"{1e3 * each['parts'][part]:.2f}" for each in found))
    table.add_section()
    table.add_row("all", *(f"{1e3 * each['overhead_seconds']:.2f}" for each in found))
    return table


def words(found: Sequence[dict[str, Any]], bound: float) -> str:
    """What the tables say, and what was counted."""
    said = []
    for each in found:
        title, memory = TITLES[each["framework"]], each["memory"]
        gap = each["largest_gradient_difference"]
        same = "the same" if gap <= bound else "NOT the same"
        line = f"{title}: gradients of all {len(each['gradient_differences'])} turns are {same} (worst {gap:.1e})"
        line += f"; own time {each['overhead']:.2%} of a step"
        if memory:
            rows, width = memory["largest_micro_batch"]
            line += f"; peak {memory['ratio']:.4f} times that of stock steps of {rows} x {width} slots, our largest"
        said.append(f"{line}.")
    if any(each["memory"] for each in found):
        said.append(_COUNTED)
    return "\n".join(said)
