"""What starting a pass costs: the fit, the search for a budget, and the command on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from lightning_padmin.diagnose import probe
from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.planning.cost_fit import fit_times, largest_budget

SHAPES = probe.CPU_SHAPES


def _times(start, slot, wide):
    return [start + slot * rows * width + wide * rows * width * width for rows, width in SHAPES]


@pytest.mark.parametrize(
    ("start", "slot", "wide"), [(8e-3, 1e-4, 5e-9), (0.5, 2e-2, 1e-5), (0.0, 1e-4, 0.0), (1e-3, 1e-5, 0.0)]
)
def test_fit_finds_the_parts(start, slot, wide):
    fit = fit_times(SHAPES, _times(start, slot, wide))
    assert fit.start == pytest.approx(start, abs=1e-9)
    assert fit.slot == pytest.approx(slot)
    assert fit.wide == pytest.approx(wide, abs=1e-12)
    assert fit.error < 1e-6
    assert fit.launch_cost == round(start / slot)


def test_no_part_is_negative():
    # Times that fall with the width: alone, least squares would subtract there.
    seconds = [1e-4 * rows * width * (1 - 5e-4 * width) - 1e-4 for rows, width in SHAPES]
    fit = fit_times(SHAPES, seconds)
    assert min(fit.start, fit.slot, fit.wide) >= 0
    assert fit.slot > 0
    assert fit.error > 0.01
    assert fit.launch_cost == 0


def test_noise_moves_the_fit_little():
    rng = np.random.default_rng(0)
    seconds = np.array(_times(8e-3, 1e-4, 0)) * rng.uniform(0.97, 1.03, len(SHAPES))
    assert fit_times(SHAPES, seconds.tolist()).launch_cost == pytest.approx(80, rel=0.25)


def test_too_few_shapes_are_refused():
    with pytest.raises(ValueError, match="2 different shapes do not tell three parts"):
        fit_times([(1, 8), (1, 16), (1, 8)], [1.0, 2.0, 1.0])


@pytest.mark.parametrize(("memory", "budget"), [(1000, None), (1024, 1024), (5000, 4096), (10**9, 2**22)])
def test_largest_budget_that_fits(memory, budget):
    tried = []

    def fits(shape):
        tried.append(shape)
        return shape[0] * shape[1] <= memory

    found, shapes = largest_budget(fits, widest=512)
    assert found == budget
    if budget is not None:
        assert shapes == ((budget // 512, 512), (budget // 32, 32))
        assert set(shapes) <= set(tried)


def test_one_extreme_shape_is_enough_to_refuse():
    found, _ = largest_budget(lambda shape: shape[0] <= 64, widest=512)  # many short rows do not fit
    assert found == 2048


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.calls: list[tuple[int, ...]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(ids.shape))
        return self.embedding(ids)


def made():
    model = Model()
    return model, lambda batch: model(batch["input_ids"]).square().mean()


def broken():
    model = Model()

    def loss(batch):
        raise RuntimeError("no such thing\nat all")

    return model, loss


@pytest.fixture
def module(monkeypatch):
    """This file as a module that `module:function` can name."""
    import sys

    monkeypatch.setitem(sys.modules, "tiny_model", sys.modules[__name__])
    return "tiny_model"


def test_every_shape_is_timed_equally_often(module, monkeypatch):
    models = []
    monkeypatch.setattr(f"{__name__}.Model.__init__", _recorded(Model.__init__, models))
    shapes = [(1, 4), (2, 4), (1, 9)]
    report = probe.probe_model(f"{module}:made", repeats=2, shapes=shapes)
    calls = models[0].calls
    assert all(calls.count(shape) == 3 for shape in shapes)  # one of them untimed
    assert calls[:3] != calls[3:6] or calls[3:6] != calls[6:9]
    assert [point[:2] for point in report.points] == shapes
    assert (report.budget, report.memory) == (None, "Memory was not checked: on a CPU only time is measured.")
    assert report.launch_costs[0] <= report.launch_costs[1]
    assert all(p.grad is None for p in models[0].parameters())


def _recorded(original, models):
    def init(self):
        original(self)
        models.append(self)

    return init


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is known without a GPU")
def test_command_measures_and_plans_with_it(module, diagnose, tmp_path):
    (tmp_path / "lengths.txt").write_text("10\n500\n" * 40)
    arguments = (tmp_path / "lengths.txt", "--model", f"{module}:made", "--repeats", 1, "--max-length", 512)
    code, out, err = diagnose(*arguments, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["data"]["setup"]["launch_cost"] == found["model"]["launch_cost"]
    assert found["data"]["launch_cost_source"] == "measured"
    _, out, _ = diagnose("--model", f"{module}:made", "--repeats", 1)
    assert "launch_cost=" in out
    assert "token_budget=" not in out
    assert "Memory was not checked" in out


def test_model_that_fails_is_one_line(module, diagnose):
    code, out, err = diagnose("--model", f"{module}:broken")
    assert (code, out) == (2, "")
    assert err == f"padmin diagnose: --model {module}:broken: a pass of 4 x 64 tokens failed (no such thing)\n"


def test_models_that_cannot_be_loaded(module, tmp_path):
    with pytest.raises(DiagnoseError, match=r"--model 'tiny_model:nothing'"):
        probe.probe_model(f"{module}:nothing")
    with pytest.raises(DiagnoseError, match=r"--model .*nowhere.* is no folder or hub id of a causal language model"):
        probe.probe_model(str(tmp_path / "nowhere"))


def test_no_repeats_are_refused(diagnose):
    code, _, err = diagnose("--model", "anything", "--repeats", 0)
    assert (code, err) == (2, "padmin diagnose: --repeats 0: expected an integer of at least 1\n")
