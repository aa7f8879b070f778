"""Runs tests on a faulty copy of the package, each time in a fork of one process that has imported the frameworks."""

from __future__ import annotations

import compileall
import importlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to.

    Attributes:
        code: pytest's exit code; None where it took too long, negative where a signal ended it.
        failed: the tests that failed, or could not be collected.
    """

    code: int | None
    failed: tuple[str, ...]
    seconds: float


class _Failures:
    """A pytest plug-in that writes down at once what fails, for the process may end in any way."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._out.open("a") as file:
                file.write(json.dumps(report.nodeid) + "\n")


@dataclass
class Worker:
    """A copy of the package, and a process to fork.

    Attributes:
        root: the project.
        folder: where the copy, logs and temporary files go.
        preload: modules of others to import once.
    """

    root: Path
    folder: Path
    preload: Sequence[str]
    _changes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.copy = self.folder / "copy"
        shutil.rmtree(self.copy, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        # The link to the integrations becomes a folder.
        shutil.copytree(self.root / "lightning_padmin", self.copy / "lightning_padmin", symlinks=False)
        # Compiled files apart from the sources; the environment may say that none are written.
        sys.pycache_prefix = str(self.folder / "compiled")
        sys.dont_write_bytecode = False
        compileall.compile_dir(self.copy, quiet=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in self.preload:
                try:
                    importlib.import_module(name)
                except Exception as error:  # one that only some test can import
                    print(f"not imported ahead: {name} ({type(error).__name__})", flush=True)
        assert not [name for name in sys.modules if name.startswith("lightning_padmin")]

    def run(self, tests: Sequence[str], timeout: float, file: str | None = None, source: bytes = b"") -> Outcome:
        """Runs tests until the first fails.

        Args:
            tests: their ids.
            timeout: seconds.
            file: the file that is faulty, relative to the project; None for the code as it is.
            source: how it reads.
        """
        failed = self.folder / "failed"
        failed.unlink(missing_ok=True)
        start = time.monotonic()
        if file is None:
            code = self._fork(tests, timeout, failed)
        else:
            path = self.copy / ("lightning_padmin/" * file.startswith("integrations/") + file)
            original = path.read_bytes()
            try:
                self._write(path, source)
                code = self._fork(tests, timeout, failed)
            finally:
                self._write(path, original)
        names = [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else []
        return Outcome(code, tuple(names), time.monotonic() - start)

    def _write(self, path: Path, source: bytes) -> None:
        """Dates differ by whole seconds each time: what was compiled before is out of date."""
        self._changes += 1
        path.write_bytes(source)
        os.utime(path, (1_000_000_000 + self._changes,) * 2)

    def _fork(self, tests: Sequence[str], timeout: float, failed: Path) -> int | None:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._be_child(tests, failed)
        limit = time.monotonic() + timeout
        code: int | None = None
        while time.monotonic() < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests have started
        if code is None:
            os.waitpid(child, 0)
        return code

    def _be_child(self, tests: Sequence[str], failed: Path) -> None:
        code = 99
        try:
            os.setsid()
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(self.root)
            os.environ["PYTHONPATH"] = str(self.copy)
            os.environ["TMPDIR"] = str(self.folder / "tmp")
            sys.path.insert(0, str(self.copy))
            options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
            code = int(pytest.main([*options, *tests], plugins=[_Failures(failed)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
