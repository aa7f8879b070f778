"""The command line: `padmin diagnose | verify | launch | env`.

commands  the parser, `verify` and `env` (what `env` says: `config.report`)
launch    options as variables for another program
__main__  `python -m lightning_padmin.cli`
"""

from lightning_padmin.cli.commands import main

__all__ = [
    "main",
]
