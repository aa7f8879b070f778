"""The sub-command `padmin diagnose`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_padmin.diagnose.fields import Columns
from lightning_padmin.diagnose.log_text import judge_log, render_log
from lightning_padmin.diagnose.logs import read_log
from lightning_padmin.diagnose.plot import save_plot
from lightning_padmin.diagnose.probe import ProbeReport, probe_model, render_probe
from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.diagnose.progress import progress
from lightning_padmin.diagnose.reading import FORMATS, Source, read_lengths
from lightning_padmin.diagnose.report import make_report
from lightning_padmin.diagnose.sampling import BATCHINGS, Setup
from lightning_padmin.diagnose.text import render
from lightning_padmin.diagnose.verdict import judge
from lightning_padmin.printing import printable, say

_DESCRIPTION = (
    "Says from your own data what padding costs, what each remedy gives, which budget to use, and when padding is not "
    "your problem; from a metrics log how long steps take; from a model what starting a pass costs. Exit code 0, or 2 "
    "for input that cannot be used."
)


def add_parser(commands: Any) -> None:
    """Adds the sub-command to the sub-parsers of `padmin`."""
    parser = commands.add_parser(
        "diagnose", help="what padding costs on your data, and which budget to use", description=_DESCRIPTION
    )
    parser.add_argument(
        "source",
        nargs="?",
        help="JSONL, JSON, CSV, TSV, Parquet or Arrow file, folder of save_to_disk, hub id, or lengths (.txt, .npy)",
    )
    parser.add_argument("--log", help="a metrics log: metrics.csv, trainer_state.json, JSONL or CSV")
    parser.add_argument("--model", help="measure a model's passes: folder, hub id, or module:function as for verify")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that lies beside the model or tokenizer; without it nothing is run, and nobody is asked",
    )
    parser.add_argument("--plot", type=Path, help="write pictures to this file")
    _add_columns(parser.add_argument_group("what to read"))
    _add_setup(parser.add_argument_group("how you train today, and what to try"))
    probe = parser.add_argument_group("log and model")
    probe.add_argument("--time-column", help="the log's column of seconds per step")
    probe.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the model measured")
    probe.add_argument("--repeats", type=int, default=5, help="timed passes of each shape (default 5)")
    parser.set_defaults(run=run)


def _add_columns(group: Any) -> None:
    group.add_argument("--length-column", help="column of lengths in tokens")
    group.add_argument("--text-column", action="append", default=[], help="column of text or chat messages; repeatable")
    group.add_argument("--prompt-field", help="column of prompts: lengths, token ids, text or messages")
    group.add_argument("--completion-field", help="column of completions, as --prompt-field")
    group.add_argument("--tokenizer", help="folder or hub id; needed for text")
    group.add_argument("--chat", action="store_true", help="put text prompts through the chat template")
    group.add_argument("--format", choices=list(FORMATS), help="kind of file, where its suffix does not say it")
    group.add_argument("--split", help="split of a data set (default train)")
    group.add_argument("--subset", help="configuration of a hub data set")
    group.add_argument("--skip-empty", action="store_true", help="leave out rows of 0 tokens, which are an error")


def _add_setup(group: Any) -> None:
    group.add_argument("--batch-size", type=int, default=8, help="rows of a batch on one rank (default 8)")
    group.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default 1)")
    group.add_argument("--world-size", type=int, default=1, help="ranks (default 1)")
    group.add_argument(
        "--batching",
        default="random",
        choices=BATCHINGS,
        help="random: shuffled; sorted: by length; file: in its order; each padded to the longest row of a batch. "
        "fixed: padded to --max-length. generation: as TRL's GRPO, prompts and completions padded to the longest of a "
        "rank's whole step (default random)",
    )
    group.add_argument("--max-length", type=int, help="rows are cut to it")
    group.add_argument("--budgets", type=_integers, help="token budgets to try, such as 8192,16384")
    group.add_argument("--max-rows", type=int, help="most rows of a micro-batch")
    group.add_argument(
        "--launch-cost", type=int, help="what one more pass costs, in slots (default 128, or measured with --model)"
    )
    group.add_argument("--pad-to-multiple-of", type=int, default=1, help="widths are rounded up to it (default 1)")
    group.add_argument("--steps", type=int, default=200, help="most optimizer steps to look at (default 200)")
    group.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected integers, such as 8192,16384") from None


def run(options: argparse.Namespace) -> int:
    """Runs what the options ask for.

    Raises:
        DiagnoseError: one line that says what cannot be used and how to correct it.
    """
    if not (options.source or options.log or options.model):
        raise DiagnoseError("nothing to look at; give a file of rows or lengths, --log FILE, or --model MODEL")
    if options.plot and not options.source:
        raise DiagnoseError("--plot draws lengths; give a file of rows or lengths too")
    texts: list[str] = []
    found: dict[str, Any] = {}
    if options.log:
        log = read_log(Path(options.log), options.time_column)
        texts.append(render_log(log))
        found["log"] = log.as_dict() | {"verdict": judge_log(log)}
    probe = _probe(options) if options.model else None
    if probe is not None:
        texts.append(render_probe(probe))
        found["model"] = probe.as_dict()
    if options.source:
        text, found["data"] = _diagnose(options, probe)
        texts.append(text)
    say(json.dumps(found, indent=2) if options.json else "\n\n".join(texts))
    return 0


def _probe(options: argparse.Namespace) -> ProbeReport:
    if options.repeats < 1:
        raise DiagnoseError(f"--repeats {options.repeats}: expected an integer of at least 1")
    with progress("timing passes", None) as tell:
        return probe_model(
            options.model,
            dtype=options.dtype,
            repeats=options.repeats,
            widest=options.max_length,
            tell=tell,
            trust_remote_code=options.trust_remote_code,
        )


def _diagnose(options: argparse.Namespace, probe: ProbeReport | None) -> tuple[str, dict[str, Any]]:
    launch_cost, told = options.launch_cost, "as given"
    if launch_cost is None:
        launch_cost, told = (128, "the default") if probe is None else (probe.fit.launch_cost, "measured")
    setup = _setup(options, launch_cost)
    source = _source(options)
    with progress(f"reading {printable(source.name, 60)}", _size(source.name)) as tell:
        lengths = read_lengths(source, tell)
    with progress("planning steps", None) as tell:
        report = make_report(lengths, setup, tell, told)
    if options.plot:
        save_plot(report, lengths, options.plot)
    return render(report), report.as_dict() | {"verdict": asdict(judge(report))}


def _setup(options: argparse.Namespace, launch_cost: int) -> Setup:
    return Setup(
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        world_size=options.world_size,
        batching=options.batching,
        max_length=options.max_length,
        budgets=options.budgets,
        max_rows=options.max_rows,
        launch_cost=launch_cost,
        pad_to_multiple_of=options.pad_to_multiple_of,
        steps=options.steps,
        seed=options.seed,
    )


def _source(options: argparse.Namespace) -> Source:
    columns = Columns(
        length=options.length_column,
        text=tuple(options.text_column),
        prompt=options.prompt_field,
        completion=options.completion_field,
        has_tokenizer=options.tokenizer is not None,
        chat=options.chat,
    )
    return Source(
        name=options.source,
        columns=columns,
        tokenizer=options.tokenizer,
        trust_remote_code=options.trust_remote_code,
        format=options.format,
        split=options.split,
        subset=options.subset,
        skip_empty=options.skip_empty,
    )


def _size(name: str) -> int | None:
    return os.path.getsize(name) if os.path.isfile(name) else None
