"""The command line: `padmin diagnose | verify | prove | launch | env`.

commands     the parser, `verify` and `env` (what `env` says: `config.report`)
prove        what the audits of a training have shown, and one step of it once more
checkpoints  what checkpoints hold: records of audits, and weights
launch       options as variables for another program
__main__     `python -m lightning_padmin.cli`
"""

from lightning_padmin.cli.commands import main

__all__ = [
    "main",
]
