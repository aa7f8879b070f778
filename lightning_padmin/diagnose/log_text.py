"""A log's report as text, with what it means and what it does not tell."""

from __future__ import annotations

from lightning_padmin.diagnose.logs import LogReport
from lightning_padmin.diagnose.verdict import FULL
from lightning_padmin.printing import printable

_FEW = 5  # step times


def render_log(report: LogReport) -> str:
    """Everything that `padmin diagnose --log FILE` prints."""
    lines = [f"{printable(report.source, 200)}: {report.entries:,} log entries"]
    if report.times is not None:
        each = report.times
        lines.append(
            f"Step time ({printable(each.column, 60)}, {each.count:,} values): mean {each.mean:.3g} s, "
            f"median {each.median:.3g} s, 10% {each.p10:.3g} s, 90% {each.p90:.3g} s, "
            f"spread {each.spread:.0%} of the mean."
        )
    for name, padding in (("Padding of the batches as they came", report.before), ("Padding as run", report.after)):
        if padding is not None:
            lines.append(f"{name}: {padding.waste:.1%} of the slots, by counts of {padding.entries:,} entries.")
    if report.completions is not None:
        lines.append(
            f"Padding of completions alone, padded to the longest of each generation over all ranks: "
            f"{report.completions.waste:.1%}, by {report.completions.source}."
        )
    for name, least, most in report.ratios:
        what = f"{printable(name, 60)}: {least:.1%} to {most:.1%}"
        lines.append(f"{what}; counts were not logged, so it cannot be merged over steps.")
    return "\n".join([*lines, "", *judge_log(report)])


def judge_log(report: LogReport) -> list[str]:
    """What a log means, in words, and what it does not tell."""
    told = [*_about_padding(report), *_about_times(report)]
    known = any(each is not None for each in (report.before, report.after, report.completions))
    if not known:
        told.append(
            "Padding was not logged, so nothing is said of it: `padmin diagnose SOURCE` reads it from your data."
        )
    return told


def _about_padding(report: LogReport) -> list[str]:
    if report.before is not None and report.after is not None:
        removed = report.before.slots / report.after.slots
        return [f"lightning-padmin ran {removed:.2f} times fewer slots than the batches had."]
    padding = report.before or report.completions
    if padding is None:
        return []
    if padding.waste < FULL:
        return [
            f"Padding is not your bottleneck: batches are {1 - padding.waste:.0%} full; look at batch size instead."
        ]
    what = "completions" if padding is report.completions else "all slots"
    return [f"Padding costs you: {padding.waste:.0%} of {what}. `padmin diagnose SOURCE` says what each remedy gives."]


def _about_times(report: LogReport) -> list[str]:
    times = report.times
    if times is None:
        return ["No column is a step time: log one (step_time, in seconds), or name it with --time-column."]
    if times.count < _FEW:
        return [f"{times.count} step times are too few to say anything of their spread."]
    if times.p90 > 1.5 * times.median:
        return [
            f"Step times are uneven: 90% is {times.p90 / times.median:.1f} times the median. Long rows that pad whole "
            "batches do that, and so do evaluation, checkpoints and first steps; the log does not say which."
        ]
    return ["Steps take nearly equal time. That does not rule padding out: batches of one width take equal time too."]
