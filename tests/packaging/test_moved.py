"""Old paths of modules lead to the modules of today: the same objects, with a warning that names the new path."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from lightning_padmin._moved import MOVED

CORE = [old for old in MOVED if ".integrations." not in old]


@pytest.mark.parametrize("old", CORE)
def test_an_old_path_is_the_new_module(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(MOVED[old])
    with pytest.warns(DeprecationWarning, match=f"{old} is {MOVED[old]} now"):
        found = importlib.import_module(old)
    assert found is new
    assert found.__name__ == found.__spec__.name == MOVED[old]  # the import system writes its own spec into a module


@pytest.mark.parametrize("old", MOVED)
def test_every_new_path_is_there(old: str) -> None:
    assert importlib.util.find_spec(MOVED[old]) is not None


def test_other_names_are_still_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lightning_padmin\.nothing"):
        importlib.import_module("lightning_padmin.nothing")
