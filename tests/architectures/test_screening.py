"""What findings mean for each way of running a model."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.architectures import findings as module
from lightning_padmin.architectures import inspect_model, refuse_batch_statistics, screen
from lightning_padmin.errors import ArchitectureError


class Model(nn.Module):
    """A module with a configuration, and modules of a kind."""

    def __init__(self, kind: str = "llama", inside: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=kind, **options)
        self.inside = inside or nn.Linear(2, 2)


ROPE = {"rope_parameters": {"rope_type": "dynamic"}}
NORM = Model(inside=nn.BatchNorm1d(2))
BALANCE = Model(output_router_logits=True, router_aux_loss_coef=0.5)
NOISE = Model(neftune_noise_alpha=5)
WIDE = Model(**ROPE)
SHORT = Model(**ROPE, max_position_embeddings=8)


@pytest.mark.parametrize(
    ("model", "tolerate", "refused"),
    [
        (Model(), (), None),
        (NORM, (), "batch-norm"),
        (NORM, ("balance-loss",), "batch-norm"),
        (NORM, ("batch-norm",), None),
        (BALANCE, (), "balance-loss"),
        (BALANCE, ("batch-norm",), "balance-loss"),
        (BALANCE, ("batch-norm", "balance-loss"), None),
        (NOISE, ("batch-norm", "balance-loss"), "embedding-noise"),
        (WIDE, ("batch-norm", "balance-loss"), "length-dependent-rope"),
        (SHORT, (), None),
    ],
)
def test_what_is_refused(model: nn.Module, tolerate: Any, refused: str | None) -> None:
    found = screen(model, tolerate=tolerate)
    assert [each.rule for each in found.refused] == ([] if refused is None else [refused])
    if refused is None:
        found.refuse()
        return
    (finding,) = [each for each in inspect_model(model) if each.rule == refused]
    with pytest.raises(ArchitectureError, match=f"^{re.escape(f'{finding.where}: {finding.reason}')}$"):
        found.refuse()


def test_every_rule_that_refuses_is_tried_above() -> None:
    """One that is new would be refused everywhere; whoever adds it decides who tolerates it."""
    rules = set(re.findall(r'Finding\(\s*"([a-z-]+)",\s*"refuse"', inspect.getsource(module)))
    assert rules == {"batch-norm", "balance-loss", "embedding-noise", "length-dependent-rope"}


def test_limits_and_options() -> None:
    found = screen(SHORT)
    assert (found.row_limit, found.scan_chunk, found.corrects) == (8, None, False)
    found = screen(Model("mamba2", chunk_size=64, use_bias=True, is_encoder_decoder=True))
    assert (found.row_limit, found.scan_chunk, found.corrects, found.is_encoder_decoder) == (None, 64, True, True)
    assert found.options(PadMinConfig()).cost_multiple_of == 64
    assert found.options(PadMinConfig(cost_multiple_of=8)).cost_multiple_of == 8


@pytest.mark.parametrize(("width", "is_refused"), [(None, False), (64, False), (128, False), (8, True), (1, True)])
def test_a_width_that_the_scan_cannot_take(width: int | None, is_refused: bool) -> None:
    found = screen(Model("xlstm", chunk_size=64), width=width)
    told = [each.rule for each in found.told]
    assert [each.rule for each in found.refused] == ["chunked-width"] * is_refused
    assert told == ["left-padding", *["chunked-width"] * (not is_refused)]


def test_of_a_function_nothing_is_known() -> None:
    found = screen(lambda **inputs: None)
    assert (found.refused, found.told, found.row_limit) == ((), (), None)
    refuse_batch_statistics(lambda **inputs: None)


def test_batch_statistics_are_refused_as_long_as_they_are_on() -> None:
    with pytest.raises(ArchitectureError, match="inside is a BatchNorm1d in training mode"):
        refuse_batch_statistics(NORM.train())
    refuse_batch_statistics(NORM.eval())


@pytest.mark.parametrize("model", [NOISE, WIDE])
def test_a_model_call_in_chunks_refuses(model: nn.Module) -> None:
    with pytest.raises(ArchitectureError):
        PaddedForward(model, PadMinConfig())


@pytest.mark.parametrize("model", [NORM, BALANCE, SHORT])
def test_a_model_call_in_chunks_takes_what_it_can_deal_with(model: nn.Module) -> None:
    PaddedForward(model, PadMinConfig(layout="pad"))
