"""One thread, and a line that says how many examples there were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    told = [
        (report.nodeid, report.duration, value)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in report.user_properties
        if name == "fuzz" and report.when == "call"
    ]
    if told:
        terminalreporter.section("examples")
        for node, seconds, counts in told:
            words = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "examples")
            line = f"{counts['examples']:>7} in {seconds:5.1f} s  {node.rsplit('/', 1)[-1]}"
            terminalreporter.write_line(line + (f": {words}" if words else ""))
        total, seconds = sum(counts["examples"] for *_, counts in told), sum(seconds for _, seconds, _ in told)
        terminalreporter.write_line(f"{total:>7} in {seconds:5.1f} s  in all")
