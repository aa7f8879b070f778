"""The sub-command `padmin prove`: what the audits of a training have shown, and one step of it once more."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_padmin.architectures import UsageError, load_step
from lightning_padmin.cli.checkpoints import ledgers_of, load_weights
from lightning_padmin.config import PadMinConfig
from lightning_padmin.diagnose.lines import read_lines
from lightning_padmin.diagnose.problems import refuse_special
from lightning_padmin.diagnose.text import table
from lightning_padmin.printing import listed, printable, say
from lightning_padmin.verification import Ledger, Report, verify_equivalence

_DESCRIPTION = (
    "Prints what the audits of a training have shown: from a checkpoint (a file of Lightning or Fabric, a folder of "
    "transformers or Accelerate), or from the file padmin/proof.jsonl next to the log. With --step, the checkpoint's "
    "weights take one real step more: gradients of the batch split and as it came are compared. Exit code 0 if audits "
    "have passed and nothing that is trained would change, 1 if something would, 2 for unusable input, and where "
    "nothing was audited."
)
_PROOFS = ("proof.jsonl", "padmin/proof.jsonl")
_MOST_ROWS = 200
_MOST_LINES = 1_000_000
_MOST_NAMES = 80  # of facets
_NAME, _WORDS = 40, 2_000  # characters


@dataclass(frozen=True)
class Seen:
    """One audit.

    Attributes:
        kind: `"audit"`, `"could not tell"` or `"refused"`.
        step: batches up to and with it.
        facets: what it has seen that none before had; else what it was asked for.
        difference, limit, way, rows, micro_batches, slots: see the file; None where a checkpoint does not keep it.
        words: of what was refused.
    """

    kind: str
    step: int
    facets: tuple[str, ...] = ()
    difference: float | None = None
    limit: float | None = None
    way: str | None = None
    rows: int | None = None
    micro_batches: int | None = None
    slots: int | None = None
    words: str | None = None


@dataclass
class Story:
    """What is known of the audits of one training.

    Attributes:
        steps: batches so far, in a file those up to the last line; None: not known.
        audits: how many have passed.
        worst: the largest difference among them.
        seen: those that are known one by one.
        facets: all that was seen.
        given_up: what was looked for in vain.
        runs: how many times the training was started; 0: not known.
        unreadable: lines of the file that were cut off.
    """

    steps: int | None = None
    audits: int = 0
    worst: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    facets: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    runs: int = 0
    unreadable: int = 0

    @property
    def refused(self) -> Seen | None:
        """What ended it, if an audit did."""
        return self.seen[-1] if self.seen and self.seen[-1].kind == "refused" else None


def add_parser(commands: Any) -> None:
    """Adds the sub-command to the sub-parsers of `padmin`."""
    parser = commands.add_parser(
        "prove", help="what the audits of a training have shown, from its checkpoint", description=_DESCRIPTION
    )
    parser.add_argument("checkpoint", help="a checkpoint, or padmin/proof.jsonl, or the folder that has it")
    parser.add_argument(
        "--step",
        metavar="MODULE:FUNCTION",
        help="a function that returns (module, function batch -> loss, batch), and a PadMinConfig as the fourth if you "
        "like: the checkpoint's weights are loaded into the module, and the step is taken split and as the batch came",
    )
    parser.add_argument("--token-budget", type=int, help="slots per micro-batch, where no PadMinConfig is returned")
    parser.add_argument(
        "--loss-reduction",
        choices=["token-mean", "row-mean", "sum"],
        help="what the loss does, where no PadMinConfig is returned (default token-mean)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs what the options ask for.

    Raises:
        UsageError: one line that says what cannot be used.
        PadMinError: the same, of a file.
    """
    path = Path(options.checkpoint)
    refuse_special(path)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder; check the path")
    proof = next((path / name for name in _PROOFS if (path / name).is_file()), path)
    is_proof = proof.suffix in (".jsonl", ".gz")
    if is_proof and options.step:
        raise UsageError(f"{proof}: has no weights to take a step with; give a checkpoint")
    stories = [story_of_file(proof)] if is_proof else [story_of(each) for each in ledgers_of(path)]
    report = _replay(path, options) if options.step else None
    if options.json:
        found = {"trainings": [asdict(each) for each in stories], "step": None if report is None else report.as_dict()}
        say(json.dumps(_finite(found), indent=2))
    else:
        say("\n\n".join(_text(path, stories) + ([] if report is None else [f"One step more:\n{report}"])))
    if any(each.refused for each in stories) or (report is not None and not report.is_exact):
        return 1
    if report is None and not any(each.audits for each in stories):
        raise UsageError(f"{path}: no audit has passed, so nothing is proven")
    return 0


def story_of(ledger: Ledger) -> Story:
    """From a checkpoint."""
    seen = [Seen("audit", each.step, each.facets, each.difference) for each in ledger.record]
    given_up = list(ledger.given_up_before)
    return Story(ledger.step, ledger.audits, ledger.worst, seen, sorted(ledger.facets), given_up)


def story_of_file(path: Path) -> Story:
    """From `padmin/proof.jsonl`.

    Raises:
        PadMinError: it is no such file.
    """
    story, facets, given_up = Story(), dict[str, None](), dict[str, None]()
    for where, line in _lines(path, story):
        if line.get("kind") == "configuration":
            story.runs += 1
            continue
        try:
            found, more = _seen(line), _texts(line.get("given_up", []))
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise UsageError(f"{where}: is no line of audits ({type(error).__name__}: {error})") from None
        story.seen.append(found)
        given_up |= dict.fromkeys(more)
        if found.kind == "audit":
            facets |= dict.fromkeys(found.facets)
            story.audits += 1
            story.worst = max(story.worst, found.difference or 0.0)
        story.steps = max(story.steps or 0, found.step)
    story.facets, story.given_up = sorted(facets), sorted(given_up.keys() - facets.keys())
    return story


def _lines(path: Path, story: Story) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, what) of each line; those that a killed machine has cut off are counted and left out."""
    for number, text in read_lines(path):
        if number > _MOST_LINES:
            raise UsageError(f"{path}: has more than {_MOST_LINES:,} lines, so it is no file of audits")
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            story.unreadable += 1
            continue
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise UsageError(f"{path}, line {number}: is no line of audits: it has no kind; give padmin/proof.jsonl")
        yield f"{path}, line {number}", line


def _seen(line: Mapping[str, Any]) -> Seen:
    def number(name: str, kind: Callable[[Any], Any]) -> Any:
        return None if line.get(name) is None else kind(line[name])

    def text(name: str) -> str | None:
        return None if line.get(name) is None else str(line[name])[:_WORDS]

    return Seen(
        kind=str(line["kind"])[:_NAME],
        step=int(line["step"]),
        facets=_texts(line.get("facets", [])),
        difference=number("difference", float),
        limit=number("limit", float),
        way=text("way"),
        rows=number("rows", int),
        micro_batches=number("micro_batches", int),
        slots=number("slots", int),
        words=text("words"),
    )


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise TypeError("facets are a list of texts")
    return tuple(each[:_WORDS] for each in values)


# One step more.


def _replay(path: Path, options: argparse.Namespace) -> Report:
    module, loss_fn, batch, config = load_step(options.step)
    given = {name: getattr(options, name) for name in ("token_budget", "loss_reduction")}
    given = {name: value for name, value in given.items() if value is not None}
    if config is not None and given:
        option = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(f"{option}: {options.step} returns a PadMinConfig; put it there")
    load_weights(path, module)
    module.train()
    config = PadMinConfig(**given) if config is None else config
    return verify_equivalence(loss_fn, batch, config, module=module, as_it_came=True)


# As text.


def _text(path: Path, stories: list[Story]) -> list[str]:
    blocks = []
    for number, story in enumerate(stories, start=1):
        which = f", training {number} of {len(stories)}" if len(stories) > 1 else ""
        blocks += [[f"{printable(path, 200)}{which}: {_heading(story)}"], _table(story), _facets(story)]
    return ["\n".join(block) for block in blocks if block]


def _heading(story: Story) -> str:
    counted = "up to step {:,}" if story.runs else "in {:,} steps"
    audits = "1 audit" if story.audits == 1 else f"{story.audits:,} audits"
    parts = [f"{audits} passed {counted.format(story.steps or 0)}"]
    if story.audits:
        parts.append(f"worst relative difference {story.worst:.1e}")
    if story.runs > 1:
        parts.append(f"started {story.runs:,} times")
    if story.unreadable:
        parts.append(f"lines that were cut off, and are left out: {story.unreadable:,}")
    return "; ".join(parts) + "."


def _table(story: Story) -> list[str]:
    shown, half = story.seen, _MOST_ROWS // 2
    if len(shown) > _MOST_ROWS:
        shown = shown[:half] + shown[-half:]
    if not shown:
        return []
    columns: dict[str, Callable[[Seen], str]] = {
        "step": lambda each: f"{each.step:,}",
        "way": lambda each: printable(each.way or "", 20),
        "rows": lambda each: _count(each.rows),
        "passes": lambda each: _count(each.micro_batches),
        "slots": lambda each: _count(each.slots),
        "difference": lambda each: "" if each.difference is None else f"{each.difference:.1e}",
        "limit": lambda each: "" if each.limit is None else f"{each.limit:.0e}",
        "new": lambda each: _count(len(each.facets)),
        "": lambda each: "" if each.kind == "audit" else printable(each.kind, 20),
    }
    known = {name: cell for name, cell in columns.items() if any(map(cell, shown))}
    lines = table(list(known), [[cell(each) for cell in known.values()] for each in shown])
    left_out = len(story.seen) - len(shown)
    return [*lines, *([f"{left_out:,} between these are left out"] if left_out else [])]


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _facets(story: Story) -> list[str]:
    lines = []
    if story.facets:
        lines.append(f"Seen ({len(story.facets)}): {listed(story.facets, _MOST_NAMES)}")
    if story.given_up:
        lines.append(f"Looked for in vain ({len(story.given_up)}): {listed(story.given_up, _MOST_NAMES)}")
    if story.refused is not None:
        lines.append(f"Refused at step {story.refused.step:,}: {printable(story.refused.words or '', _WORDS)}")
    return lines


def _finite(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


__all__ = ["add_parser", "run", "story_of", "story_of_file"]
