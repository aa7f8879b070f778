"""Releases of frameworks, and hooks that have changed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import check_hooks, release, what_changed


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.13.0", (2, 13, 0)),
        ("0.19.8+cu126", (0, 19, 8)),
        ("1.16.0.dev0", (1, 16, 0)),
        ("2.5.2rc1", (2, 5)),
        ("0.29", (0, 29)),
        ("5.24.0.post1", (5, 24, 0)),
        ("", ()),
        ("(not imported)", ()),
    ],
)
def test_release(version: str, wanted: tuple[int, ...]) -> None:
    assert release(version) == wanted


def test_what_a_release_is_older_than() -> None:
    assert release("0.9.9") < release("0.16.1") < (0, 17)
    assert release("2.5.2rc1") < (2, 5, 2) <= release("2.5.2") < release("2.10")
    assert release("unknown") < (0, 1)


class Trainer:
    def step(self, model: Any, inputs: Any, more: Any = None) -> None: ...

    def wrapped(self, *args: Any, **options: Any) -> None: ...

    no_method = 3


@pytest.mark.parametrize(
    ("name", "expected", "found"),
    [
        ("step", ["self", "model", "inputs"], None),
        ("step", ["self", "model", "inputs", "more"], None),
        ("step", [], None),
        ("step", ["self", "inputs"], "Trainer.step takes ['self', 'model', 'inputs', 'more']"),
        ("step", ["self", "model", "inputs", "more", "most"], "Trainer.step takes ['self', 'model', 'inputs', 'more']"),
        ("wrapped", [], None),
        ("gone", [], "Trainer.gone is gone"),
        ("no_method", [], "Trainer.no_method is gone"),
    ],
)
def test_what_changed(name: str, expected: list[str], found: str | None) -> None:
    assert what_changed(Trainer, name, expected) == found


class OtherError(Exception):
    pass


def test_a_changed_hook_is_refused_by_name() -> None:
    right = (Trainer, "step", ["self", "model"])
    check_hooks([right], "lib", "3.1", "Use 3.0")
    wrong = (Trainer, "step", ["self", "batch"])
    found = "Trainer.step takes ['self', 'model', 'inputs', 'more'], expected ['self', 'batch']"
    message = f"^{re.escape(f'lib 3.1: {found}. Use 3.0')}$"
    for kind in (ConfigError, OtherError):
        with pytest.raises(kind, match=message):
            check_hooks([right, wrong], "lib", "3.1", "Use 3.0", *([] if kind is ConfigError else [kind]))
