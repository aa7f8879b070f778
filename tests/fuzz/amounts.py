"""How many examples a property sees, and within which time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Amount:
    """Examples of one property.

    Attributes:
        examples: wanted.
        least: needed, for the test to pass.
        seconds: of this process on a core, after which no more are made.
        repeat: the same examples in every run.
    """

    examples: int
    least: int
    seconds: float
    repeat: bool = True

    def run(self, record: Callable[[str, Any], None], check: Callable[..., Any], *strategies: Any) -> Counter[str]:
        """Calls `check` with examples; what it returns is counted. Returns the counts."""
        tally: Counter[str] = Counter()
        started, failed = time.process_time(), False

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=self.repeat,
            print_blob=not self.repeat,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.tuples(*strategies))
        def body(values: tuple[Any, ...]) -> None:
            nonlocal failed
            if not failed and time.process_time() - started > self.seconds:
                return
            try:
                told = check(*values)
            except BaseException:
                failed = True  # what shrinking tries next must not be cut off
                raise
            tally["examples"] += 1
            tally.update(told if isinstance(told, Counter) else [told] if told else [])

        body()
        record("fuzz", dict(tally))
        assert tally["examples"] >= self.least, f"{tally} in {self.seconds} s"
        return tally


def amounts(examples: int, seconds: float = 120) -> Any:
    """The parameter `amount`: three fifths of so many examples, at least half of them, and five times all when slow."""
    usual = Amount(examples * 3 // 5, examples // 2, seconds)
    long = Amount(5 * examples, 2 * examples, 5 * seconds, repeat=False)
    marks = [pytest.mark.slow, pytest.mark.timeout(20 * seconds)]
    return pytest.mark.parametrize(
        "amount", [pytest.param(usual, id="usual"), pytest.param(long, id="long", marks=marks)]
    )
