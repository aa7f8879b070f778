"""Batches and rows without any loss token: a mean over none is 0/0."""

from __future__ import annotations

import pytest
import support
import torch
from lightning.fabric import Fabric
from support import BUDGET, LENGTHS, Module, fit, fit_pair, make_batch, padmin, ragged_batches, relative, token_losses
from torch import Tensor

from lightning_padmin import PadMinConfig, PadMinWarning, iter_micro_batches
from lightning_padmin.integrations.fabric import FabricPadMin


class Masked(Module):
    """A mean over tokens whose gradient, like the loss, is 0/0 where there are none."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])[:, :-1]
        targets, valid = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
        losses = -logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0] * valid
        if self.how == "token-mean":
            return losses.sum() / valid.sum()
        return (losses.sum(1) / valid.sum(1)).mean() if self.how == "row-mean" else losses.sum()


def without_loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_labels_moves_nothing(how: str, accumulate: int) -> None:
    first, second, third, fourth = ragged_batches(4)
    module, plain = Masked(how), Masked(how)
    batches = [first, without_loss(second), third, without_loss(fourth)]
    with pytest.warns(PadMinWarning) as caught:
        fit(module, batches, padmin(loss_reduction=how), accumulate_grad_batches=accumulate)
    told = [str(warning.message) for warning in caught if warning.category is PadMinWarning]
    assert len(told) == 1
    assert told[0].startswith("a batch has no loss tokens at all: a mean over them is 0/0 or 0")
    fit(plain, [first, third])
    assert support.flat_parameters(module).isfinite().all()
    if accumulate == 1:
        zeros = torch.zeros_like(module.gradients[0])
        assert torch.equal(module.gradients[1], zeros)
        assert torch.equal(module.gradients[3], zeros)
        assert [float(loss) for loss in module.losses][1::2] == [0.0, 0.0]
        assert relative(support.flat_parameters(module), support.flat_parameters(plain)) <= 1e-12
    else:
        assert relative(module.gradients[0], plain.gradients[0] / 2) <= 1e-12


def test_without_us_such_a_batch_ruins_the_parameters() -> None:
    first, second, third = ragged_batches(3)
    module = Masked()
    fit(module, [first, without_loss(second), third])
    assert support.flat_parameters(module.model.head).isnan().all()


def test_rows_without_labels_ride_along() -> None:
    """None of them makes up a micro-batch of its own, whose mean would be 0/0."""
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    pair = fit_pair(Masked, batches)
    assert pair.gradient <= 1e-12
    assert all(loss.isfinite() for loss in pair.split.losses)


@pytest.mark.usefixtures("equal_weights")
def test_rows_without_labels_would_count_if_weights_were_equal() -> None:
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    assert fit_pair(Masked, batches).gradient > 0.1


class Penalised(Module):
    """A guarded token mean, and something else: a penalty of parameters, or of what each row makes of them."""

    penalty = "parameters"

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses, valid = token_losses(self.model(batch["input_ids"]), batch["labels"]), batch["labels"][:, 1:] != -100
        mean = losses.sum() / valid.sum().clamp(min=1)
        if self.penalty == "parameters":
            return mean + 0.1 * sum(p.pow(2).sum() for p in self.model.parameters())
        hidden = (self.model.embedding(batch["input_ids"]) * batch["attention_mask"][..., None]).sum(1)
        rows = hidden.pow(2).sum(1) / batch["attention_mask"].sum(1)
        return mean + rows.mean()


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
@pytest.mark.parametrize("penalty", ["parameters", "rows"])
def test_a_penalty_stays_where_no_token_has_loss(penalty: str) -> None:
    """A penalty that is a mean over rows is one over tokens too where rows are alike."""
    kind = type("Kind", (Penalised,), {"penalty": penalty})
    batches = ragged_batches(3) if penalty == "parameters" else [make_batch([6] * 3, seed=k) for k in range(3)]
    batches[1] = without_loss(batches[1])
    pair = fit_pair(kind, batches, {"token_budget": 12 if penalty == "rows" else BUDGET})
    assert pair.gradient <= 1e-12
    assert pair.parameters <= 1e-12


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
def test_nothing_of_the_penalty_would_be_left_with_weights_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the weights of such a batch as they once were."""
    from lightning_padmin.microbatching.batcher import MicroBatches

    original = MicroBatches.__init__

    def zeroed(self: MicroBatches, *args: object, **options: object) -> None:
        original(self, *args, **options)  # type: ignore[arg-type]
        if not self.table.has_loss:
            self.weights = self.weights * 0

    monkeypatch.setattr(MicroBatches, "__init__", zeroed)
    first, second = ragged_batches(2)
    assert fit_pair(Penalised, [first, without_loss(second)]).gradient > 0.9


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
def test_manual_loops_and_fabric_keep_it_too() -> None:
    """A loop of one's own takes the weights as they are; Fabric's `backward` gets over 0/0 as before."""
    batch = without_loss(make_batch(LENGTHS))
    whole, split = Penalised(), Penalised()
    whole.loss(batch).backward()
    for micro, weight in iter_micro_batches(batch, PadMinConfig(token_budget=BUDGET, launch_cost=0)):
        (split.loss(micro) * weight).backward()
    assert relative(support.flat_gradient(split.model), support.flat_gradient(whole.model)) <= 1e-12
    fabric = Fabric(accelerator="cpu", devices=1)
    for kind, wanted in ((Penalised, support.flat_gradient(whole.model)), (Masked, None)):
        module = kind()
        model = fabric.setup_module(module.model)
        module.model = model
        pad = FabricPadMin(fabric, PadMinConfig(token_budget=BUDGET, launch_cost=0))
        loss = pad.backward(batch, model, module.loss)
        found = support.flat_gradient(model)
        assert loss.isfinite()
        assert found.abs().max() == 0 if wanted is None else relative(found, wanted) <= 1e-12
