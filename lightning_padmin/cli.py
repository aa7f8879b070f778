"""The command line: `padmin diagnose`, `padmin verify`, `padmin launch`, `padmin env`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_padmin.config import PadMinConfig
from lightning_padmin.diagnose.command import add_parser
from lightning_padmin.environment import describe
from lightning_padmin.errors import PadMinError
from lightning_padmin.launch import launch
from lightning_padmin.verify import verify_equivalence

_LENGTHS = "5,9,23,12,40,31,7,18"
LossFunction = Callable[[Any], Tensor]


class UsageError(Exception):
    """Something the user gave cannot be used; the message names it and the fix."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if what was asked holds, 1 if not (verify: a difference was found; env: the configuration cannot be
        resolved), 2 for input that cannot be used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launch"] and not {"-h", "--help"} & set(words[1:2]):
        # Not through argparse, which would take some of the launcher's options for its own.
        options = argparse.Namespace(command="launch", run=_launch, arguments=words[1:])
    else:
        options = _parser().parse_args(words)
    try:
        return int(options.run(options))
    except (UsageError, PadMinError) as error:
        print(f"padmin {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="padmin", description="Padding removed before tensors reach the model.")
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
    verify.set_defaults(run=_verify)
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
    print(text)
    return 0 if is_resolved else 1


def _verify(options: argparse.Namespace) -> int:
    torch.manual_seed(options.seed)
    module, loss_fn = _load(options.model)
    module.to(getattr(torch, options.dtype)).train()
    batch = _random_batch(_parse_lengths(options.lengths), _vocabulary(module), options.seed)
    config = PadMinConfig(
        token_budget=options.token_budget, loss_reduction=options.loss_reduction, launch_cost=16, max_rows=3
    )
    forward = None if loss_fn is not None else lambda b: _logits(module, b)
    loss = loss_fn if loss_fn is not None else lambda b: _token_mean(_logits(module, b), b["labels"])
    packed = None if loss_fn is not None or not _takes_positions(module) else lambda ids, at: _packed(module, ids, at)
    report = verify_equivalence(loss, batch, config, module=module, forward=forward, packed=packed)
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return 0 if report.is_exact else 1


def _load(name: str) -> tuple[nn.Module, LossFunction | None]:
    """The module, and the loss if the user's function gave one."""
    if ":" in name and not Path(name).exists():
        return _from_function(name)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"{name!r} needs transformers to be loaded: pip install transformers") from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name!r} is no folder or hub id of a causal language model ({reason})") from error
    return model, None


def _from_function(name: str) -> tuple[nn.Module, LossFunction | None]:
    path, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(path), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r}: {error}; expected module:function, importable from here") from error
    finally:
        sys.path.pop(0)
    module, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss_fn is None or callable(loss_fn)):
        raise UsageError(
            f"{name!r} returned {type(made).__name__}: expected a module or (module, function batch -> loss)"
        )
    return module, loss_fn


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if len(lengths) < 2 or min(lengths) < 1:
        raise UsageError(f"--lengths {text!r}: expected at least two integers of at least 1, such as {_LENGTHS}")
    return lengths


def _vocabulary(module: nn.Module) -> int:
    """Number of token ids; positions may have an embedding of another size."""
    known = getattr(module, "get_input_embeddings", lambda: None)()
    children = [known, *module.modules()]
    return next((child.num_embeddings for child in children if isinstance(child, nn.Embedding)), 100)


def _random_batch(lengths: list[int], vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Left-padded rows of random tokens, (B, L) int64; the first token of each row carries no loss."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for row, length in enumerate(lengths):
        tokens = torch.randint(1, vocabulary, (length,), generator=generator)
        ids[row, -length:], mask[row, -length:] = tokens, 1
        if length > 1:
            labels[row, 1 - length :] = tokens[1:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _logits(module: nn.Module, batch: Any) -> Tensor:
    device = next(module.parameters()).device
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
    logits: Tensor = module(**inputs, use_cache=False).logits
    return logits


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def _packed(module: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    # Without a cache and a mask transformers builds a block-diagonal mask from restarting positions.
    logits: Tensor = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


def _token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device), ignore_index=-100)


if __name__ == "__main__":
    sys.exit(main())
