"""layout="pack" inside of a Trainer, against the same Trainer without the callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import support
import torch
from architectures import zoo
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import LENGTHS, Module, equal_weights, fit, padmin, ragged_batches, relative, token_losses
from torch import Tensor, nn
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import BatchError, ConfigError, GradientCheckError
from lightning_padmin.microbatching.packed_layout import PackMap

SIZES = {
    "vocab_size": support.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXACT = 1e-12


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Models of transformers cast to float32 by name; in here that name means float64, so that bounds are tight."""
    with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        yield


def qwen2(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation=attention)).double()


def lfm2() -> nn.Module:
    torch.manual_seed(1)
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    return Lfm2ForCausalLM(config).double()


class OwnLoss(Module):
    """The loss that the model itself makes of labels."""

    def __init__(self, make: Callable[[], nn.Module] = qwen2) -> None:
        super().__init__()
        self.model = make()

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self.model(**batch).loss


class StepLoss(OwnLoss):
    """A loss of the step's own, which hands on what the model needs."""

    reads = ("input_ids", "attention_mask", "position_ids")

    def loss(self, batch: dict[str, Any]) -> Tensor:
        logits = self.model(**{name: batch[name] for name in self.reads if name in batch}, use_cache=False).logits
        return token_losses(logits, batch["labels"]).sum() / (batch["labels"][:, 1:] != -100).sum()


class Forgetful(StepLoss):
    """Leaves the positions out."""

    reads = ("input_ids", "attention_mask")


class Summed(StepLoss):
    def loss(self, batch: dict[str, Any]) -> Tensor:
        logits = self.model(**{name: batch[name] for name in self.reads if name in batch}, use_cache=False).logits
        return token_losses(logits, batch["labels"]).sum() / 100


class Coupled(StepLoss):
    """A softmax over rows."""

    def loss(self, batch: dict[str, Any]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.logsumexp(token_losses(logits, batch["labels"]).sum(1) / 10, 0)


def worst(a: Module, b: Module) -> float:
    assert len(a.gradients) == len(b.gradients) > 0
    return max(relative(x, y) for x, y in zip(a.gradients, b.gradients, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [OwnLoss, StepLoss])
def test_gradients_losses_and_metrics_are_the_stock_ones(kind: type[OwnLoss], attention: str) -> None:
    batches = ragged_batches(4)

    def make() -> OwnLoss:
        return kind(lambda: qwen2(attention))

    stock, packed, callback = make(), make(), padmin(layout="pack")
    plain = fit(stock, batches, accumulate_grad_batches=2)
    trainer = fit(packed, batches, callback, accumulate_grad_batches=2)
    assert worst(packed, stock) <= EXACT
    torch.testing.assert_close(packed.losses, stock.losses, rtol=1e-12, atol=0)
    for name, value in plain.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-12, atol=0)
    stats = callback.stats
    assert stats.slots == stats.real_tokens == 4 * sum(LENGTHS)
    assert stats.waste == 0
    assert stats.loss_tokens == 4 * (sum(LENGTHS) - len(LENGTHS))
    assert stats.micro_batches > stats.batches


def test_labels_on_the_first_token_of_each_row() -> None:
    """As most collators make them; in a pack they would be predicted from another row."""
    batches = ragged_batches(2)
    for batch in batches:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    stock, packed = OwnLoss(), OwnLoss()
    fit(stock, batches)
    fit(packed, batches, padmin(layout="pack"))
    assert worst(packed, stock) <= EXACT
    assert packed.shapes[-1][0] == 1


def test_weights_of_one_over_k_are_far_off() -> None:
    stock, packed = OwnLoss(), OwnLoss()
    fit(stock, ragged_batches(2))
    with equal_weights():
        fit(packed, ragged_batches(2), padmin(layout="pack", check="first-batch"))
    assert worst(packed, stock) > 1e-2


def test_a_summed_loss() -> None:
    stock, packed = Summed(), Summed()
    fit(stock, ragged_batches(2))
    fit(packed, ragged_batches(2), padmin(layout="pack", loss_reduction="sum"))
    assert worst(packed, stock) <= EXACT


def test_joint_mode_packs_inside_of_the_step() -> None:
    """For losses that couple rows: they see the batch as it came."""
    batches = ragged_batches(2)
    stock, packed, callback = Coupled(), Coupled(), padmin(layout="pack", mode="joint")
    fit(stock, batches)
    fit(packed, batches, callback)
    assert worst(packed, stock) <= EXACT
    assert packed.shapes == stock.shapes
    assert callback.stats.waste == 0


@pytest.mark.parametrize("mode", ["auto", "joint"])
def test_a_model_that_leaks_is_refused_with_what_was_measured(mode: Any) -> None:
    kind = StepLoss if mode == "auto" else Coupled
    module = kind(lfm2)
    with pytest.raises(ArchitectureError, match=r"layout='pack': .*Lfm2ForCausalLM.* outputs change by \d") as error:
        fit(module, ragged_batches(2), padmin(layout="pack", mode=mode))
    assert "Use layout='pad'" in str(error.value)
    assert not module.gradients
    stock = kind(lfm2)
    fit(stock, ragged_batches(2))
    again = kind(lfm2)
    fit(again, ragged_batches(2), padmin(layout="auto", mode=mode))
    assert worst(again, stock) <= EXACT


def test_a_step_that_leaves_out_positions_is_refused() -> None:
    """The model is fine; the step lets documents run into each other."""
    module = Forgetful()
    with pytest.raises(GradientCheckError, match=r"Rows were packed .*must hand batch\['position_ids'\] and"):
        fit(module, ragged_batches(2), padmin(layout="pack"))
    assert not module.gradients


class Noisy(Forgetful):
    """Draws a random number that it does not use."""

    def loss(self, batch: dict[str, Any]) -> Tensor:
        torch.rand(1)
        return super().loss(batch)


class Head(StepLoss):
    """A recurrent head behind the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.GRU(support.VOCABULARY, support.VOCABULARY, batch_first=True).double()

    def loss(self, batch: dict[str, Any]) -> Tensor:
        inputs = {name: batch[name] for name in self.reads if name in batch}
        logits = self.head(self.model(**inputs, use_cache=False).logits)[0]
        return token_losses(logits, batch["labels"]).sum() / (batch["labels"][:, 1:] != -100).sum()


class NeedsMask(StepLoss):
    def loss(self, batch: dict[str, Any]) -> Tensor:
        return super().loss(batch) * batch["attention_mask"].float().mean().detach().ceil()


FEW = [[5, 3], [4, 6], [7, 2], [3, 3]]
LONG = [[22, 20, 23, 21, 19, 22], [20, 23, 22, 19, 21, 20]]


@pytest.mark.parametrize("lengths", [FEW, LONG])
@pytest.mark.parametrize("kind", [Forgetful, Head, Noisy])
def test_nothing_is_trained_on_packs_before_the_step_is_proven(kind: type[OwnLoss], lengths: list[list[int]]) -> None:
    """Also where batches have two rows, or rows that fill the budget by twos."""
    module, batches = kind(), [support.make_batch(each, seed=k) for k, each in enumerate(lengths)]
    with pytest.raises(GradientCheckError, match=r"Rows were packed|stays unproven"):
        fit(module, batches, padmin(layout="pack", token_budget=48))
    assert not module.gradients


def test_batches_that_do_not_tell_are_padded_until_one_does() -> None:
    """Rows one at a time, then two: exact all along, packed in the end."""
    batches = [support.make_batch(each, seed=k) for k, each in enumerate([[5], [7], [4, 6], [7, 2, 3]])]
    stock, ours, callback = StepLoss(), StepLoss(), padmin(layout="pack", token_budget=48)
    fit(stock, batches)
    fit(ours, batches, callback)
    assert worst(ours, stock) <= EXACT
    assert [shape[0] for shape in ours.shapes][-2:] == [1, 1]
    forgetful = Forgetful()
    with pytest.raises(GradientCheckError):
        fit(forgetful, batches, padmin(layout="pack", token_budget=48))
    assert worst_of(forgetful, stock, 2) <= EXACT


def worst_of(found: Module, wanted: Module, steps: int) -> float:
    assert len(found.gradients) == steps
    return max(relative(a, b) for a, b in zip(found.gradients, wanted.gradients[:steps], strict=True))


@pytest.mark.parametrize("kind", [Forgetful, Head, Noisy, NeedsMask])
def test_auto_pads_what_cannot_be_proven(kind: type[OwnLoss], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_padmin.verification.leak.has_varlen_kernel", lambda model: True)
    monkeypatch.setattr(
        "lightning_padmin.microbatching.packed_layout.PackMap.arguments", without_borders(PackMap.arguments)
    )
    stock, ours, callback = kind(), kind(), padmin(layout="auto", check="first-batch")
    fit(stock, ragged_batches(2))
    fit(ours, ragged_batches(2), callback)
    assert worst(ours, stock) <= EXACT
    assert callback.stats.slots > callback.stats.real_tokens


def without_borders(arguments: Any) -> Any:
    """No kernel is here that would take them."""
    return lambda self, device: {k: v for k, v in arguments(self, device).items() if k in ("position_ids", "use_cache")}


def test_no_call_of_the_model_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the callback has decided that joint mode pads (sharded strategies), no leak test runs inside of a step."""
    monkeypatch.setattr("lightning_padmin.verification.leak.has_varlen_kernel", lambda model: True)
    monkeypatch.setattr("lightning_padmin.integrations.common.Session.pack_policy", lambda *arguments, **more: None)
    monkeypatch.setattr(
        "lightning_padmin.verification.leak.measure_leak", lambda *arguments: pytest.fail("a leak test ran")
    )
    stock, ours, callback = Coupled(), Coupled(), padmin(layout="auto", mode="joint")
    fit(stock, ragged_batches(2))
    fit(ours, ragged_batches(2), callback)
    assert worst(ours, stock) <= EXACT
    assert callback.stats.slots > callback.stats.real_tokens


def test_auto_packs_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_padmin.verification.leak.has_varlen_kernel", lambda model: True)
    monkeypatch.setattr(
        "lightning_padmin.microbatching.packed_layout.PackMap.arguments", without_borders(PackMap.arguments)
    )
    stock, ours, callback = StepLoss(), StepLoss(), padmin(layout="auto")
    fit(stock, ragged_batches(2))
    fit(ours, ragged_batches(2), callback)
    assert worst(ours, stock) <= EXACT
    assert callback.stats.waste == 0


def test_holes_in_a_mask_are_named_before_anything_is_compared() -> None:
    batches = ragged_batches(1)
    row = int(batches[0]["attention_mask"].sum(1).argmax())
    batches[0]["attention_mask"][row, 3] = 0
    batches[0]["labels"][row, 3] = -100
    with pytest.raises(BatchError, match=r"layout='pack': 'attention_mask' has holes inside of 1 rows"):
        fit(StepLoss(), batches, padmin(layout="pack"))


def test_a_step_that_needs_the_mask_is_told_of_packs() -> None:
    with pytest.raises(AttributeError) as error:
        fit(NeedsMask(), ragged_batches(2), padmin(layout="pack"))
    assert "Rows were packed (layout='pack'): the mask is None" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    ("make", "options", "trainer", "message"),
    [
        (Module, {}, {}, "no attribute that looks like a model of transformers"),
        (OwnLoss, {"check": "off"}, {}, "check='off' would leave unproven"),
        (OwnLoss, {"loss_reduction": "row-mean"}, {}, "a pack is one row of many documents"),
        (OwnLoss, {"log_reduce": {"loss": "row-mean"}}, {}, "a pack is one row of many documents"),
    ],
)
def test_what_is_refused_at_the_start(
    make: Callable[[], Module], options: dict[str, Any], trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises((MisconfigurationException, ConfigError), match=message):
        fit(make(), ragged_batches(2), padmin(layout="pack", **options), **trainer)


def test_manual_optimization_is_not_packed() -> None:
    module = OwnLoss()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="with manual optimization nothing checks"):
        fit(module, ragged_batches(2), padmin(layout="pack"))


def test_auto_pads_here_and_trains_the_same() -> None:
    stock, ours, callback = OwnLoss(), OwnLoss(), padmin(layout="auto")
    fit(stock, ragged_batches(2))
    fit(ours, ragged_batches(2), callback)
    assert worst(ours, stock) <= EXACT
    assert callback.stats.slots > callback.stats.real_tokens
