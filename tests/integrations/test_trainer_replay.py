"""PadMinTrainerMixin where batches are larger than the budget and stay whole: chunks keep no activations.

Stock Trainers are the oracle, in float64: gradients at each step of the optimizer, and all that is logged.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import joint_cases as cases
import pytest
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import PadMinWarning
from lightning_padmin.integrations.common.plain import few_rows, len_of

EXACT = 1e-12
REPLAY = PadMinConfig(mode="replay", token_budget=64, launch_cost=4)
AUTO = PadMinConfig(token_budget=64, launch_cost=4, batch_schema={"kind": "row"})


def told_by(step: type, padmin: PadMinConfig, **options: Any) -> tuple[list[str], Any]:
    """What is told in a training that is stock's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        ours = cases.train(step, padmin=padmin, **options)
    stock = cases.train(step, **options)
    assert cases.apart(ours, stock) <= EXACT
    assert cases.logs_apart(ours, stock) <= EXACT
    assert ours.trainer.padding_stats.waste <= ours.trainer.padding_stats.waste_before / 2
    return [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)], ours


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in cases.OWN if each is not cases.Contrastive]


@pytest.mark.parametrize("step", [cases.Contrastive, *SLOW])
def test_steps_of_ones_own(step: type) -> None:
    told, ours = told_by(step, REPLAY)
    assert told == []
    assert ours.trainer.padding_stats.micro_batches >= 3 * ours.trainer.padding_stats.batches


@pytest.mark.parametrize("window", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_by_itself(window: int) -> None:
    """It is larger than the budget, so it neither keeps all activations nor raises."""
    [words], ours = told_by(cases.Contrastive, AUTO, gradient_accumulation_steps=window)
    assert "mode='replay' where a batch has more slots than the budget" in words
    assert ours.trainer._padmin._session.audits.metrics("")["mode"] in (1, 2)  # the last batch may be a small one
    assert {each["way"] for each in ours.trainer._padmin._session.audits.state()} <= {"joint", "replay"}


class Outer(nn.Module):
    """Calls a model of transformers, whose calls would run in chunks by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        found: Tensor = self.inner.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return found


class OfOuter(cases.Own):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        hidden = model(inputs["input_ids"], inputs["attention_mask"])
        weight = inputs["attention_mask"].to(hidden.dtype)[..., None]
        return cases.contrast((hidden * weight).sum(1) / weight.sum(1))


def test_a_model_inside_of_what_runs_again() -> None:
    """Its calls are a part of the chunk, in the backward pass too."""
    [words], _ = told_by(OfOuter, AUTO, make=Outer, num_train_epochs=1)
    assert "mode='replay' where a batch has more slots than the budget" in words


@pytest.mark.slow
def test_values_that_a_loss_logs_are_of_the_whole_batch() -> None:
    """A loss that could be split, but logs by itself."""
    [words], _ = told_by(cases.Own, AUTO, num_train_epochs=1)
    assert "the loss logs 'guessed' itself" in words


@pytest.mark.slow
@pytest.mark.parametrize("step", cases.OWN)
def test_others_by_themselves(step: type) -> None:
    told_by(step, AUTO)


def test_a_chunk_is_kept_at_a_time() -> None:
    """Saved for the backward pass of a batch, in numbers: those of the model are gone."""

    class Weighed(cases.Contrastive):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            counted = [0]

            def pack(saved: Tensor) -> Tensor:
                counted[0] += saved.numel() * (saved.ndim > 2)
                return saved

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                result = super().compute_loss(*args, **options)
            self.counted = counted[0]
            return result

    found = {}
    for mode in ("joint", "replay"):
        options = replace(REPLAY, mode=mode, check="off")
        found[mode] = cases.train(Weighed, padmin=options, num_train_epochs=1).trainer.counted
    assert found["replay"] < 0.2 * found["joint"]


class Switched(nn.Module):
    """Embeddings behind one of two adapters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.active = inner, 0
        self.adapters = nn.ModuleList([nn.Linear(16, 16, bias=False).double() for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.inner(input_ids)
        return embedded + self.adapters[self.active](embedded).tanh()


class BothAdapters(cases.Own):
    """Rows by one adapter against rows by the other, shortest rows first."""

    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        lengths = [len(row["input_ids"]) for row in self.train_dataset]
        return sorted(range(len(lengths)), key=lengths.__getitem__)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        given, found = {name: inputs[name] for name in ("input_ids", "attention_mask")}, []
        for k in range(2):
            model.get_input_embeddings().active = k
            found.append(cases.pooled(model(**given, output_hidden_states=True), given["attention_mask"]))
        return nn.functional.cross_entropy(found[0] @ found[1].T, torch.arange(len(found[0])))


def test_the_first_batch_that_is_replayed_is_audited() -> None:
    """What keeping activations gives does not tell what running again gives: by then the other adapter is active."""

    def make() -> nn.Module:
        model = cases.llama()
        model.set_input_embeddings(Switched(model.get_input_embeddings()))
        return model

    options: dict[str, Any] = {"make": make, "num_train_epochs": 1}
    with pytest.warns(PadMinWarning, match="as with mode='joint'"):
        ours = cases.train(BothAdapters, padmin=replace(AUTO, token_budget=100), **options)
    stock = cases.train(BothAdapters, **options)
    assert cases.apart(ours, stock) <= EXACT
    [state] = ours.trainer._padmin._session.audits.state()
    assert state["facets"]["chunks that are replayed"] == 4  # the first three are small


def test_rows_of_a_check() -> None:
    """As many as the budget holds, of whatever a batch is, if all of it has rows."""
    batch = {"a": torch.arange(12).view(6, 2), "more": {"b": torch.arange(6)}, "names": list("uvwxyz"), "n": 3}
    assert len_of(batch) == 6
    few = few_rows(batch, 4)
    assert few["more"]["b"].tolist() == [0, 2, 3, 5]
    assert few["a"].tolist() == [[0, 1], [4, 5], [6, 7], [10, 11]]
    assert (few["names"], few["n"]) == (list("uwxz"), 3)
    assert len_of({"a": torch.zeros(4, 2), "b": torch.zeros(2)}) == 0
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    assert few_rows({"attention_mask": mask, "row": torch.arange(5)}, 2)["row"].tolist() == [2, 3]

    seen: list[int] = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = cases.llama()
            self.config = self.inner.config

        def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
            seen.append(input_ids.numel())
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, **options)

    cases.train(cases.Contrastive, make=Seen, padmin=replace(REPLAY, token_budget=120), num_train_epochs=1)
    assert max(seen) <= 120
