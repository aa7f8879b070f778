"""Models inside of wrappers, and arguments of functions."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_padmin.runtime import layers, takes, unwrap, without_adapters


class Model(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return input_ids


class Wrapper(nn.Module):
    """As DistributedDataParallel, FSDP, DeepSpeed's engine and Fabric's wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


class Compiled(nn.Module):
    """As torch.compile makes it: what it does not have itself, it asks its model for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name: str) -> Any:
        return self._modules["_orig_mod"] if name == "_orig_mod" else getattr(self._orig_mod, name)


class Adapters(nn.Module):
    """As a PeftModel: `module` is none of its names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.base_model(*args, **options)


MODEL = Model()


@pytest.mark.parametrize(
    "wrapped",
    [
        MODEL,
        Wrapper(MODEL),
        Wrapper(Wrapper(MODEL)),
        Compiled(MODEL),
        Compiled(Wrapper(MODEL)),
        Wrapper(Compiled(MODEL)),
        nn.DataParallel(MODEL),
    ],
)
def test_the_model_inside(wrapped: nn.Module) -> None:
    assert unwrap(wrapped) is MODEL
    assert list(layers(wrapped))[-1] is MODEL


def test_what_is_compiled_may_stay() -> None:
    compiled = Compiled(MODEL)
    assert unwrap(Wrapper(compiled), compiled=False) is compiled


def test_how_far_one_looks() -> None:
    inner = Wrapper(MODEL)
    outer = nn.DataParallel(inner)
    assert unwrap(outer, through=lambda each: isinstance(each, nn.DataParallel)) is inner
    assert unwrap(inner, through=lambda each: False) is inner


def test_adapters_are_a_layer_but_not_a_wrapper() -> None:
    adapted = Adapters(MODEL)
    assert unwrap(Wrapper(adapted)) is adapted
    assert without_adapters(adapted) is MODEL
    assert without_adapters(MODEL) is MODEL
    outer = Wrapper(adapted)
    assert list(layers(outer)) == [outer, adapted, MODEL]


def test_a_module_that_names_no_module_so_is_none() -> None:
    model = Model()
    model.module = "text"  # type: ignore[assignment]
    assert unwrap(model) is model
    assert unwrap(max) is max
    assert list(layers(max)) == [max]


def test_a_wrapper_of_itself_ends() -> None:
    adapted = Adapters(MODEL)
    adapted.base_model = adapted  # type: ignore[assignment]
    assert list(layers(adapted)) == [adapted]


def _all_names(**options: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "named", "at_all"),
    [
        (MODEL, "attention_mask", True, True),
        (MODEL, "position_ids", False, False),
        (Wrapper(MODEL), "attention_mask", False, True),
        (_all_names, "attention_mask", False, True),
        (lambda ids: ids, "ids", True, True),
    ],
)
def test_takes(function: Any, name: str, named: bool, at_all: bool) -> None:
    assert takes(function, name, by_name=True) is named
    assert takes(function, name) is at_all
