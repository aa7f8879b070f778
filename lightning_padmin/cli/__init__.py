"""The command line: `padmin diagnose | verify | launch | env`.

commands  the parser, `verify` launch    options as variables for another program env       versions and sources, for
bug reports
"""

from lightning_padmin.cli.commands import main

__all__ = [
    "main",
]
