"""Attributes that are replaced for a while."""

from __future__ import annotations

from types import ModuleType

import pytest
from torch import nn

from lightning_padmin.runtime import replaced


class Thing:
    kept = "of the class"

    def __init__(self) -> None:
        self.own = "own"


@pytest.mark.parametrize("fails", [False, True])
def test_own_ones_come_back_and_others_are_the_class_s_again(fails: bool) -> None:
    thing = Thing()
    try:
        with replaced(thing, own=1, kept=2):
            assert (thing.own, thing.kept) == (1, 2)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert vars(thing) == {"own": "own"}
    assert thing.kept == "of the class"


def test_what_is_changed_or_removed_inside_comes_back_too() -> None:
    thing = Thing()
    with replaced(thing, own=1, kept=2):
        thing.own = 5
        del thing.kept
    assert vars(thing) == {"own": "own"}


def test_one_inside_of_another() -> None:
    thing = Thing()
    with replaced(thing, own=1):
        with replaced(thing, own=2):
            assert thing.own == 2
        assert thing.own == 1
    assert thing.own == "own"


def test_modules_register_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    stand_in = nn.Linear(2, 2)
    with replaced(model, forward=stand_in):
        assert model.forward is stand_in
        assert len(list(model.parameters())) == 2
    assert "forward" not in vars(model)
    assert "forward" not in model._modules


def test_functions_of_a_python_module() -> None:
    module = ModuleType("some")
    module.f = original = len
    with replaced(module, f=max):
        assert module.f is max
    assert module.f is original


def test_what_is_not_there_is_named() -> None:
    thing = Thing()
    with pytest.raises(AttributeError, match="gone"), replaced(thing, own=1, gone=2):
        pass
    assert vars(thing) == {"own": "own"}
