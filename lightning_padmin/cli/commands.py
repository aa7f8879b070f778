"""The command line: `padmin diagnose`, `padmin verify`, `padmin prove`, `padmin launch`, `padmin env`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from lightning_padmin.architectures import (
    UsageError,
    load_model,
    logits_of,
    packed_logits,
    random_batch,
    takes_positions,
    token_mean,
    vocabulary_of,
)
from lightning_padmin.cli import prove
from lightning_padmin.cli.launch import launch
from lightning_padmin.config import PadMinConfig, describe
from lightning_padmin.diagnose.command import add_parser
from lightning_padmin.errors import PadMinError
from lightning_padmin.printing import first_line, printable, say
from lightning_padmin.verification import verify_equivalence

_LENGTHS = "5,9,23,12,40,31,7,18"
_MOST_SLOTS = 2**24  # of the batch that verify makes
_MESSAGE = 2_000  # characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if what was asked holds, 1 if not (verify, prove: a difference was found; env: the configuration cannot be
        resolved), 2 for input that cannot be used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launch"] and not {"-h", "--help"} & set(words[1:2]):
        # Not through argparse, which would take some of the launcher's options for its own.
        options = argparse.Namespace(command="launch", run=_launch, arguments=words[1:])
    else:
        options = _parser().parse_args(words)
    if options.command == "launch":  # what the script raises or exits with is the script's
        return _told(options.command, lambda: int(options.run(options)))
    try:
        return _told(options.command, lambda: int(options.run(options)))
    except KeyboardInterrupt:
        return _refused(options.command, "interrupted")
    except SystemExit as error:  # a code of 0 would say that all is well
        return _refused(options.command, f"the model's code ended the process (SystemExit: {error})")
    except Exception as error:  # of a file, or of the user's model; 1 would say that training changes
        return _refused(options.command, f"{type(error).__name__}: {first_line(error)}")


def _told(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except (UsageError, PadMinError) as error:
        return _refused(command, str(error))


def _refused(command: str, reason: str) -> int:
    """One line, whatever the reason quotes."""
    say(f"padmin {command}: " + printable(" ".join(reason.split("\n")), _MESSAGE), sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Quotes arguments, which may be names of files, as a terminal may show them."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, _MESSAGE))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="padmin", description="Padding removed before tensors reach the model.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_parser(commands)
    verify = commands.add_parser(
        "verify",
        help="check on a model that splitting changes nothing",
        description="Makes a batch of random tokens, left-padded, and compares training with and without splitting. "
        "Exit code 0 if nothing that is trained would change, 1 if something would, 2 for unusable input.",
    )
    verify.add_argument(
        "model",
        help="folder or hub id of a causal language model, or module:function returning a module, or a pair "
        "(module, function batch -> loss)",
    )
    verify.add_argument("--lengths", default=_LENGTHS, help=f"row lengths in tokens (default {_LENGTHS})")
    verify.add_argument("--token-budget", type=int, default=128, help="slots per micro-batch (default 128)")
    verify.add_argument(
        "--loss-reduction", default="token-mean", choices=["token-mean", "row-mean", "sum"], help="what the loss does"
    )
    verify.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verify.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that lies beside the model; without it nothing is run, and nobody is asked",
    )
    verify.set_defaults(run=_verify)
    prove.add_parser(commands)
    commands.add_parser(
        "launch",
        help="accelerate launch, for a configuration file with a section padmin_config",
        usage="padmin launch [argument of accelerate launch ...] SCRIPT [argument ...]",
        description="Takes the arguments of `accelerate launch`. Options of PadMinConfig stand in the file's section "
        "padmin_config; PADMIN_* variables override them. Trainers of transformers and TRL need no change; loops use "
        "PadMin(accelerator).",
    )
    env = commands.add_parser(
        "env",
        help="versions, devices, the configuration and where it comes from, for bug reports",
        description="Prints versions, devices, the configuration that holds here, and where it comes from. Exit code "
        "0, or 1 if the configuration cannot be resolved.",
    )
    env.set_defaults(run=_env)
    return parser


def _launch(options: argparse.Namespace) -> int:
    launch(options.arguments)
    return 0


def _env(options: argparse.Namespace) -> int:
    text, is_resolved = describe()
    say(text)
    return 0 if is_resolved else 1


def _verify(options: argparse.Namespace) -> int:
    if not -(2**63) <= options.seed < 2**63:
        raise UsageError(f"--seed {printable(options.seed, 30)}: expected an integer of 64 bits")
    lengths = _parse_lengths(options.lengths)
    torch.manual_seed(options.seed)
    module, loss_fn = load_model(options.model, options.trust_remote_code)
    module.to(getattr(torch, options.dtype)).train()
    batch = random_batch(lengths, vocabulary_of(module), options.seed)
    config = PadMinConfig(
        token_budget=options.token_budget, loss_reduction=options.loss_reduction, launch_cost=16, max_rows=3
    )
    forward = None if loss_fn is not None else lambda b: logits_of(module, b)
    loss = loss_fn if loss_fn is not None else lambda b: token_mean(logits_of(module, b), b["labels"])
    packed = (
        None if loss_fn is not None or not takes_positions(module) else lambda ids, at: packed_logits(module, ids, at)
    )
    report = verify_equivalence(loss, batch, config, module=module, forward=forward, packed=packed)
    say(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return 0 if report.is_exact else 1


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if len(lengths) < 2 or min(lengths) < 1:
        given = printable(text, 200)
        raise UsageError(f"--lengths {given!r}: expected at least two integers of at least 1, such as {_LENGTHS}")
    if len(lengths) * max(lengths) > _MOST_SLOTS:
        raise UsageError(f"--lengths: {len(lengths):,} rows x {max(lengths):,} tokens are too many to verify")
    return lengths


if __name__ == "__main__":
    sys.exit(main())
