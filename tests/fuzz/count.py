"""`python tests/fuzz/count.py`: runs the fuzz tests in one process and prints how many examples each has seen.

Arguments are pytest's; `-m slow` gives ten times as many, with other seeds in every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    chosen = sys.argv[1:] or ["-m", "not slow"]
    raise SystemExit(pytest.main([str(Path(__file__).parent), "-q", "-p", "no:cacheprovider", *chosen]))
