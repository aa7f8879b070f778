"""The first-batch check: what it refuses, what it names, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import support
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from support import LENGTHS, Module, fit, make_batch, padmin, ragged_batches, token_losses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_padmin.errors import GradientCheckError, PadMinWarning

REDUCTIONS = ("token-mean", "row-mean", "sum")


def fails(module: Module, batches: list[Any], match: str, **options: Any) -> None:
    """The fit is refused before anything is trained, and the Trainer's own loop is back."""
    before, callback = support.flat_parameters(module), padmin(**options)
    trainer = support.quiet_trainer(callback)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(GradientCheckError, match=match) as caught:
        trainer.fit(module, support.loader(batches))
    assert "first-batch check" in str(caught.value)
    assert torch.equal(support.flat_parameters(module), before)
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
    assert all(p.grad is None for p in module.parameters())
    assert module.shapes == []


class Step(Module):
    """A module whose loss is a function of (losses (B, L-1), batch)."""

    def __init__(self, loss: Callable[[Tensor, dict[str, Tensor]], Tensor], **options: Any) -> None:
        super().__init__(**options)
        self.function = loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.function(token_losses(self.model(batch["input_ids"]), batch["labels"]), batch)


# What it finds


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("declared", REDUCTIONS)
def test_a_wrong_reduction_is_refused_and_the_right_one_named(how: str, declared: str) -> None:
    if how == declared:
        module = Module(how)
        fit(module, ragged_batches(1), padmin(loss_reduction=declared))
        assert len(module.gradients) == 1
    else:
        fails(Module(how), ragged_batches(1), f"set loss_reduction='{how}'", loss_reduction=declared)


@pytest.mark.parametrize("how", REDUCTIONS)
def test_single_precision_tells_them_apart_too(how: str) -> None:
    wrong = "row-mean" if how == "token-mean" else "token-mean"
    module = Module(how, dtype=torch.float32)
    fit(module, ragged_batches(1), padmin(loss_reduction=how))
    fails(Module(how, dtype=torch.float32), ragged_batches(1), f"set loss_reduction='{how}'", loss_reduction=wrong)


def test_mixed_precision() -> None:
    fit(Module(dtype=torch.float32), ragged_batches(1), padmin(), precision="bf16-mixed")
    with pytest.raises(GradientCheckError, match="set loss_reduction='token-mean'"):
        fit(Module(dtype=torch.float32), ragged_batches(1), padmin(loss_reduction="sum"), precision="bf16-mixed")


def test_a_wrong_shift_is_named() -> None:
    """Labels that line up with the logits: one more target in each row, so other shares."""

    def unshifted(batch: dict[str, Tensor], model: nn.Module) -> Tensor:
        logits = model(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    class Unshifted(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return unshifted(batch, self.model)

    batches = ragged_batches(1, prompt=0)
    fit(Unshifted(), batches, padmin(label_shift=0))
    fails(Unshifted(), batches, "set label_shift=0")


def test_labels_made_in_the_step_are_named() -> None:
    """The step trains every attended token, the labels of the batch say otherwise."""

    class OwnLabels(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            return support.reduce_loss(token_losses(self.model(batch["input_ids"]), labels), labels, "token-mean")

    batches = [make_batch(LENGTHS)]
    batches[0]["labels"][:, 1::2] = -100
    batches[0]["labels"][:3, 2:10] = -100
    advice = "set loss_reduction='token-mean', labels_key=None, loss_mask_key='attention_mask'"
    fails(OwnLabels(), batches, advice)
    module = OwnLabels()
    fit(module, batches, padmin(loss_reduction="token-mean", labels_key=None, loss_mask_key="attention_mask"))
    assert len(module.gradients) == 1


def rows_of(*pairs: tuple[int, int]) -> dict[str, Tensor]:
    """A batch from (prompt, completion) lengths; completions carry loss."""
    batch = make_batch([prompt + completion for prompt, completion in pairs])
    for row, (prompt, _) in enumerate(pairs):
        batch["labels"][row, :prompt] = -100
    return batch


def test_rows_that_cannot_tell_prompts_from_completions_are_not_the_last_word() -> None:
    """(5, 12) and (2, 3): 12 of 15 targets, and 16 of 20 if prompts count too; both are 0.8. Other cuts tell."""

    def everything(_: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = token_losses(module.model(batch["input_ids"]), batch["input_ids"])
        mask = batch["attention_mask"][:, 1:]
        return (losses * mask).sum() / mask.sum()

    alike, other = rows_of((3, 4), (6, 9), (2, 3), (5, 12)), rows_of((3, 4), (6, 9), (2, 9), (5, 7))
    module = Step(everything)
    with pytest.raises(GradientCheckError, match="loss_mask_key='attention_mask'"):
        fit(module, [alike, other], padmin(token_budget=40))
    assert module.gradients == []
    fit(Step(lambda losses, batch: losses.sum() / (batch["labels"][:, 1:] != -100).sum()), [alike, other], padmin())


def test_other_weights_of_rows_are_recognised() -> None:
    def by_importance(losses: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (losses.sum(1) * batch["importance"]).sum() / batch["importance"].sum()

    batches = [make_batch(LENGTHS) | {"importance": torch.tensor([5.0, 1, 7, 1, 1, 3, 1, 1, 2, 9]).double()}]
    fails(Step(by_importance), batches, "weighs rows in another way .* loss_reduction=function")
    fit(Step(by_importance), batches, padmin(loss_reduction=lambda batch: batch["importance"]))


COUPLED: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "weights by a softmax over rows": lambda losses, batch: torch.logsumexp(losses.sum(1), 0),
    "negatives of the other rows": lambda losses, batch: nn.functional.cross_entropy(
        losses[:, :1] - losses[:, :1].T, torch.arange(len(losses))
    ),
    "top quantile of tokens": lambda losses, batch: losses[losses >= losses.flatten().quantile(0.8)].mean(),
    "variance over rows": lambda losses, batch: losses.sum(1).var(),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("declared", REDUCTIONS)
def test_losses_that_couple_rows_are_refused(name: str, declared: str) -> None:
    found = "reads padding" if "quantile" in name else "couples rows"  # a quantile of zeros, too, which padding has
    fails(Step(COUPLED[name]), ragged_batches(1), f"{found}.*PaddedForward", loss_reduction=declared)


def _hardest(rows: Tensor) -> Tensor:
    return rows.topk(max(1, len(rows) // 2)).values.mean()


def _above_median(rows: Tensor) -> Tensor:
    return rows[rows >= rows.detach().quantile(0.5)].mean()


def _weighed_by_loss(rows: Tensor) -> Tensor:
    return (rows.detach().softmax(0) * rows).sum()


@pytest.mark.parametrize("choose", [_hardest, _above_median, _weighed_by_loss])
@pytest.mark.parametrize("seed", range(4))
def test_losses_of_the_hardest_rows_are_refused_whatever_groups_they_are_in(
    choose: Callable[[Tensor], Tensor], seed: int
) -> None:
    def loss(losses: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return choose(losses.sum(1) / (batch["labels"][:, 1:] != -100).sum(1))

    fails(Step(loss), [make_batch(LENGTHS, seed=seed, prompt=2)], "couples rows|weighs rows", loss_reduction="row-mean")


def test_control_of_the_hardest_rows() -> None:
    """Without the check it trains something else."""

    def loss(losses: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return _hardest(losses.sum(1) / (batch["labels"][:, 1:] != -100).sum(1))

    batches = [make_batch(LENGTHS, seed=0, prompt=2)]
    pair = support.fit_pair(lambda: Step(loss), batches, options={"loss_reduction": "row-mean", "check": "off"})
    assert pair.gradient > 0.05


def test_a_model_that_reads_padding_is_refused() -> None:
    """A mean over all columns, padding included, depends on the width of the batch."""

    class Pools(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            pooled = self.model.embedding(batch["input_ids"]).mean(1)
            return nn.functional.cross_entropy(self.model.head(pooled), batch["target"])

    batch = make_batch(LENGTHS) | {"target": torch.arange(10)}
    del batch["labels"]
    fails(Pools(), [batch], "the model or the loss reads padding", loss_reduction="row-mean")


def test_prompts_that_the_mask_leaves_out_are_noticed() -> None:
    """The mask marks completions only: the roll would drop every prompt."""
    batch = make_batch([24, 20, 12, 12, 8, 8], prompt=5)
    batch["attention_mask"][:, :4] = 0
    fails(Module(), [batch], "leave out prompts, not padding.*mask_key")


# When it runs


def test_rows_of_one_length_do_not_tell_and_a_later_batch_does() -> None:
    class Counts(Module):
        forwards = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).forwards += 1
            return super().training_step(batch, batch_idx)

    same, ragged = make_batch([6] * 8), make_batch(LENGTHS)
    module, callback = Counts("row-mean"), padmin(loss_reduction="token-mean")
    with pytest.raises(GradientCheckError, match="set loss_reduction='row-mean'"):
        fit(module, [same, same, ragged], callback)
    assert len(module.gradients) == 2  # of the batches where both are the same
    # Two times two micro-batches, and for each of the two checks that ran three passes (un-split and two halves) and
    # four rows alone; the one that refuses runs weighted halves, and makes sure that un-split gradients repeat.
    assert Counts.forwards == 4 + (3 + 4) + (3 + 4 + 2 + 1)


def test_batches_of_one_row_are_not_checked_and_not_in_the_way() -> None:
    module = Module()
    fit(module, [make_batch([n]) for n in (5, 9, 4)], padmin())
    assert len(module.gradients) == 3


def test_few_rows_run_and_within_the_budget() -> None:
    shapes: list[tuple[int, ...]] = []

    class Watches(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            shapes.append(tuple(batch["input_ids"].shape))
            return super().loss(batch)

    budget = 60
    fit(Watches(), [make_batch(LENGTHS, width=40)], padmin(token_budget=budget))
    assert shapes[:3] == [(5, 12), (3, 6), (2, 12)]
    assert max(rows * width for rows, width in shapes) <= budget


def test_off_is_off() -> None:
    module = Module("row-mean")
    fit(module, ragged_batches(1), padmin(check="off"))
    assert len(module.shapes) == 5


def test_what_the_step_raises_comes_through() -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing") as caught:
        fit(Fails(), ragged_batches(1), padmin())
    assert any("first-batch check" in note and "check='off'" in note for note in caught.value.__notes__)


def test_a_step_that_draws_random_numbers() -> None:
    class Noise(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            losses = token_losses(self.model(batch["input_ids"]), batch["labels"])
            return support.reduce_loss(losses * torch.rand_like(losses), batch["labels"], self.how)

    fails(Noise("row-mean"), ragged_batches(1), "set .*loss_reduction='row-mean'")
    module = Noise()
    fit(module, ragged_batches(1), padmin())
    assert len(module.gradients) == 1

    class Numpy(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            losses = token_losses(self.model(batch["input_ids"]), batch["labels"])
            return support.reduce_loss(
                losses * torch.from_numpy(np.random.rand(*losses.shape)), batch["labels"], self.how
            )

    fails(Numpy(), ragged_batches(1), "draws random numbers outside of dropout.*cannot be told.*check='off'")


# What it leaves


class Remembers(Module):
    """Everything that a step may write into."""

    padmin_per_call = ("ema", "seen", "log_of_losses", "by_name", "plain")

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("ema", torch.zeros(12, dtype=torch.float64))
        self.seen, self.log_of_losses, self.by_name = 0, [], {"nested": [1]}
        self.metric = torchmetrics.MeanMetric()
        self.plain = torch.zeros(2, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.dropout(self.model.rnn(self.model.embedding(batch["input_ids"]))[0])
        self.ema.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        loss = support.reduce_loss(
            token_losses(self.model.head(hidden), batch["labels"]), batch["labels"], "token-mean"
        )
        self.seen += 1
        self.log_of_losses.append(float(loss))
        self.by_name["nested"].append(float(loss))
        self.by_name[f"step {self.seen}"] = 1
        self.plain[0] += 1
        self.draws = (random.random(), float(np.random.rand()))
        self.metric.update(loss.detach())
        self.log("loss", loss)
        self.log("metric", self.metric)
        return loss


def test_training_is_the_same_with_and_without_the_check(tmp_path: Path) -> None:
    """Parameters, buffers, attributes, metrics, random numbers and what loggers got, to the bit."""
    kept = []
    for check in ("first-batch", "off"):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        module, logger = Remembers(), CSVLogger(tmp_path, name=check)
        trainer = fit(module, ragged_batches(4), padmin(check=check), logger=logger, log_every_n_steps=1)
        kept.append(
            {
                "parameters": support.flat_parameters(module),
                "ema": module.ema,
                "plain": module.plain,
                "draws": (module.draws, random.random(), float(np.random.rand()), float(torch.rand(()))),
                "metric": module.metric.compute(),
                "logged": {key: float(value) for key, value in trainer.callback_metrics.items()},
                "state": [module.seen, module.log_of_losses, module.by_name["nested"], len(module.by_name)],
                "file": (Path(logger.log_dir) / "metrics.csv").read_text(),
            }
        )
    assert kept[0].pop("file") == kept[1].pop("file")
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0, equal_nan=True)
    assert kept[0]["state"][0] == 20


def test_the_state_of_a_refused_fit_is_as_before() -> None:
    class Wrong(Remembers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 3  # still a token mean

    module = Wrong()
    with pytest.raises(GradientCheckError, match="set loss_reduction='token-mean'"):
        fit(module, ragged_batches(1), padmin(loss_reduction="sum"))
    assert (module.seen, module.log_of_losses, module.by_name) == (0, [], {"nested": [1]})
    assert not hasattr(module, "draws")
    assert not module.ema.any()


# Models that need care


def test_reentrant_checkpointing_is_checked_too() -> None:
    class Checkpointed(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            hidden = self.model.embedding(batch["input_ids"])
            hidden = checkpoint(lambda x: self.model.rnn(x)[0], hidden, use_reentrant=True)
            losses = token_losses(self.model.head(hidden), batch["labels"])
            return support.reduce_loss(losses, batch["labels"], self.how)

    fit(Checkpointed(), ragged_batches(1), padmin())
    fails(Checkpointed("row-mean"), ragged_batches(1), "set loss_reduction='row-mean'")


def test_frozen_and_unused_parameters() -> None:
    class Partly(Module):
        def __init__(self, how: str) -> None:
            super().__init__(how)
            self.unused = nn.Linear(3, 3)
            self.model.embedding.weight.requires_grad_(False)

    fit(Partly("token-mean"), ragged_batches(1), padmin())
    fails(Partly("row-mean"), ragged_batches(1), "set loss_reduction='row-mean'")


def test_the_check_fires_no_hook_of_the_user_on_gradients() -> None:
    module = Module()
    calls = []
    module.model.head.weight.register_hook(lambda grad: calls.append(1) or grad * 2)
    fit(module, ragged_batches(1), padmin())
    assert len(calls) == 5  # micro-batches


def test_gradients_that_wait_for_their_step_are_kept() -> None:
    pair = support.fit_pair(partial(Module), ragged_batches(4), accumulate_grad_batches=2)
    assert pair.gradient <= 1e-12


def test_the_tokens_of_a_row_that_is_over_the_budget() -> None:
    batches = [make_batch([60, 3, 50, 2])]
    with pytest.warns(PadMinWarning, match="exceed token_budget"):
        fit(Module(), batches, padmin())
    with (
        pytest.warns(PadMinWarning, match="exceed token_budget"),
        pytest.raises(GradientCheckError, match="loss_reduction='row-mean'"),
    ):
        fit(Module("row-mean"), batches, padmin())


class Routed(nn.Module):
    """Some gradients differ by a part where fewer rows run, as with tokens that rounding sends to other experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="mixtral", num_local_experts=experts)
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight * (1 + 0.3 * torch.tensor([float(len(ids) < 4), 0, 0, 0, 0]))


@pytest.mark.parametrize("experts", [1, 8])
def test_experts_in_half_precision_are_warned_of(experts: int) -> None:
    class Experts(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Routed(experts)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(batch["input_ids"]).mean()

    batches = [make_batch([6, 6, 3, 3])]
    if experts > 1:
        with pytest.warns(PadMinWarning, match="rounding sends to other experts"):
            fit(
                Experts(),
                batches,
                padmin(mode="split", loss_reduction="row-mean", token_budget=48),
                precision="bf16-mixed",
            )
    else:
        with pytest.raises(GradientCheckError):
            fit(
                Experts(),
                batches,
                padmin(mode="split", loss_reduction="row-mean", token_budget=48),
                precision="bf16-mixed",
            )
    with pytest.raises(GradientCheckError):
        fit(Experts(), batches, padmin(mode="split", loss_reduction="row-mean"))


@pytest.mark.parametrize("how", ["first-batch", "audit"])
def test_a_module_is_checked_once_by_one_callback(how: Literal["first-batch", "audit"]) -> None:
    calls = [0]

    class Counts(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            calls[0] += 1
            return super().loss(batch)

    callback, module = padmin(check=how), Counts()
    seen = []
    for each in (module, module, Counts()):
        calls[0] = 0
        fit(each, ragged_batches(1), callback)
        seen.append(calls[0])
    # A fit may have another loss, so an audit begins anew.
    assert seen[0] == seen[2] >= 3 + 4 + 5
    assert seen[1] == (5 if how == "first-batch" else seen[0])
