"""Kinds of faults that users of other trainers have reported in public, and which tests here show each of them.

Every kind has a number. Its tests are called `test_r<number>_...`: one takes the input of the report, the others (or
other parameters) inputs of our own of the same kind. Each has a negative control: the wrong way, as a small function or
a patched library, gives another value for the same input.

    python tests/reports/kinds.py

prints how many kinds are covered. `OUTSIDE` names those that this library can do nothing about.
"""

from __future__ import annotations

import re
from pathlib import Path

# number -> (where it was reported, what goes wrong, in one line)
KINDS: dict[str, tuple[str, str]] = {
    "R01": (
        "ms-swift 3069",
        "rows padded on both sides: after the roll completions begin at other columns in each row",
    ),
    "R02": ("TRL 4974", "a mask with holes is sorted, or its zeros counted, in place of its leading padding"),
    "R03": ("TRL 3382", "rows flushed to one side and then cut by column: short rows lose all real tokens"),
    "R05": ("verl 6176", "ranks plan different numbers of micro-batches, and wait for each other for ever"),
    "R06": ("EasyR1 11004", "a rank has fewer rows than there are micro-batches to run"),
    "R07": ("unsloth 9848", "a row that attends to nothing gives NaN, and zero times NaN is NaN"),
    "R09": ("TRL 5826", "a loss of zero that is cut off from the graph: no gradients, no reduction"),
    "R11": ("TRL 4104", "losses per row averaged with one weight per micro-batch"),
    "R13": ("transformers 46204", "targets counted without the shift, or before the roll"),
    "R14": ("axolotl 2739", "position ids restart in the padding behind a row, which then looks packed"),
    "R15": ("TRL 6800", "learned positions count padding before a row"),
    "R17": ("NeMo Automodel 1482", "position ids (3, rows, width) indexed along the wrong dimension"),
    "R18": ("TRL 6570", "images handed to other rows than theirs"),
    "R22": ("transformers 39392", "means of ranks averaged, however few tokens a rank has"),
    "R23": ("TRL 2617", "the division by the number of accumulated batches is missing"),
    "R24": ("ms-swift 10117", "a loss over the whole window is divided by its batches once more"),
    "R25": ("TRL 6369", "tokens that are masked stay in the divisor"),
    "R28": ("TRL 1911", "a loss that pairs rows of a batch is taken per micro-batch"),
    "R29": ("verl 7553", "number of micro-batches from the sum of lengths: padded rows exceed the budget"),
    "R31": ("OpenRLHF 1280", "a row longer than the budget is dropped, cut, or put with others in silence"),
    "R32": ("OpenRLHF 1296", "rows that do not divide evenly vanish"),
    "R34": ("accelerate 4111", "strings, flags, None and scalars of a batch sliced like rows"),
    "R35": ("TRL 6357", "the end-of-sequence token taken for padding because both have one id"),
    "R37": ("transformers 32677", "a recurrent state takes in padding before the row"),
    "R38": ("DeepSpeed 8183", "an engine that counts backward passes steps in the middle of a batch"),
    "R39": ("accelerate 3481", "no_sync where gradients are sharded"),
    "R40": ("PiPPy 1133", "no_sync around the backward pass alone: gradients are reduced each time"),
    "R41": ("TRL 835", "several forward passes before one backward pass, with checkpointing under DDP"),
    "R43": ("accelerate 963", "the schedule advances with every micro-batch"),
    "R45": ("Lightning 19987", "the last, short accumulation window"),
    "R46": ("Lightning 1733", "a callback cannot hand another batch to training_step"),
    "R47": ("Lightning 9237", "manual optimization without a reduction of gradients"),
    "R49": ("Lightning 10093", "the number of rows guessed from whatever tensor comes first"),
    "R51": ("transformers 37766", "a count of targets is passed to a model that ignores it"),
    "R52": ("transformers 38035", "counts gathered on a device or in a width that does not fit"),
    "R53": ("prime-rl 2515", "evaluation runs different numbers of passes on each rank"),
    "R55": ("NeMo RL 3563", "a trimmed width that kernels or parallelism cannot divide"),
    "R56": ("PyTorch 188150", "a new shape, and so a new compilation, for every batch"),
    "R57": ("transformers 28505", "the balance loss of experts counts padding, or is taken per micro-batch"),
    "R60": ("NeMo Automodel 3755", "lengths of rows without token ids read as 0, and nothing said"),
    "R61": ("transformers 29889", "padding counted as tokens seen"),
    "R62": ("TRL 3495", "everything padded to the longest completion of a generation"),
    "R63": ("mamba 1015", "sizes beyond 32 bits"),
    "R64": ("NeMo RL 2319", "short micro-batches first: memory falls to pieces and runs out late"),
    "R65": ("Lightning 18060", "a checkpoint at the end of a batch resumes one batch off"),
    "R66": ("TRL 3234", "dropout draws other masks when a batch is split, or when a pass is repeated"),
    "R67": ("transformers 26869", "half precision depends on the shape of the batch, and is taken for a fault"),
}

# number -> why nothing here can show it
OUTSIDE: dict[str, str] = {}


def collected() -> dict[str, list[str]]:
    """Names of the tests of each kind, read from the files of this folder."""
    found: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for name, number in re.findall(r"^def (test_r(\d\d)_\w+)", file.read_text(), re.M):
            found.setdefault(f"R{number}", []).append(f"{file.stem}::{name}")
    return found


def expected_to_fail() -> set[str]:
    """Kinds with a test that is marked as one that fails."""
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    return {f"R{number}" for number in re.findall(r"pytest\.mark\.xfail\((?:.|\n)*?def test_r(\d\d)_", text)}


def main() -> None:
    found = collected()
    covered = [kind for kind in KINDS if kind in found]
    for kind, (where, what) in KINDS.items():
        tests = found.get(kind, [])
        print(f"{kind}  {len(tests)} tests  {what} ({where})" if tests else f"{kind}  outside: {OUTSIDE.get(kind)}")
    failing = ", ".join(sorted(expected_to_fail())) or "none"
    print(f"{len(KINDS)} kinds: {len(covered)} covered, {len(OUTSIDE)} outside, expected to fail: {failing}")


if __name__ == "__main__":
    main()
