"""What the user logs reaches loggers and monitors as it does un-split."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import LENGTHS, Memory, Module, Row, fit, fitted, mixed_batches, padmin, ragged_batches
from torch import Tensor

from lightning_padmin.errors import PadMinWarning


def assert_same_rows(ours: Memory, stock: Memory, relative: float = 1e-12) -> None:
    """Steps, keys and their order, and values."""
    assert [step for step, _ in ours.of("")] == [step for step, _ in stock.of("")]
    for (_, mine), (_, theirs) in zip(ours.of(""), stock.of(""), strict=True):
        assert list(mine) == list(theirs)
        assert mine == pytest.approx(theirs, rel=relative, abs=0)


class Talkative(Module):
    """Logs in every way whose whole is known from its parts."""

    def __init__(self, how: str = "token-mean") -> None:
        super().__init__(how)
        self.seen_tokens, self.token_length = torchmetrics.SumMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        length, rows = batch["attention_mask"].sum(1), len(batch["labels"])
        tokens, valid = length.sum(), batch["labels"][:, 1:] != -100
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, prog_bar=True, **both)
        self.log("loss_by_default", loss)
        self.log("loss_of_rows", loss, batch_size=rows, on_step=False, on_epoch=True)
        self.log("even_targets", (batch["labels"][:, 1:][valid] % 2 == 0).double().mean(), **both)
        self.log("tokens", tokens.double(), reduce_fx="sum", **both)
        self.log("integer_tokens", tokens, reduce_fx=torch.sum, **both)
        self.log("longest", length.max().double(), reduce_fx="max", **both)
        self.log("shortest", length.min().double(), reduce_fx=min, **both)
        self.log("twice", loss, **both)
        self.log("twice", 2 * loss, **both)
        self.log("constant", 1 / 3, **both)
        self.log("large_constant", 16_777_215.0)
        if length.max() > 10:  # not in every micro-batch, and not in every batch
            self.log("long_rows", (length > 10).sum().double(), reduce_fx="sum", on_epoch=True)
            self.log("a_constant_of_some", 0.1)
        self.log_dict({"tokens_again": tokens.double(), "targets": valid.sum().double()}, reduce_fx="sum")
        self.seen_tokens.update(tokens)
        self.token_length.update(length.double(), length.double())
        self.log("seen_tokens", self.seen_tokens, on_step=False, on_epoch=True)
        self.log("token_length", self.token_length, on_step=False, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)
        self.log("zero_grads", float(self.zero_grads), on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("steps_so_far", float(self.trainer.global_step), reduce_fx="sum", on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("gradient_norm", self.gradients[-1].norm(), on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", 3.0)


@pytest.fixture(scope="module", params=[1, 2], ids="accumulate {}".format)
def logged(request: pytest.FixtureRequest) -> tuple[Memory, Memory]:
    """Rows of a split and of a stock run of two epochs."""
    options = {"max_epochs": 2, "accumulate_grad_batches": request.param}
    split = fitted(Talkative(), mixed_batches(), padmin(), **options)
    return split, fitted(Talkative(), mixed_batches(), **options)


def column(memory: Memory, name: str) -> list[tuple[int | None, float]]:
    return [(step, row[name]) for step, row in memory.of("") if name in row]


FORKED = ("loss", "even_targets", "tokens", "integer_tokens", "longest", "shortest", "twice", "constant", "long_rows")
FORKED += ("zero_grads", "steps_so_far", "gradient_norm")
KEYS = [f"{name}_{when}" for name in FORKED for when in ("step", "epoch")]
KEYS += ["loss_by_default", "loss_of_rows", "large_constant", "a_constant_of_some", "tokens_again", "targets"]
KEYS += ["seen_tokens", "token_length", "epoch_end", "epoch"]


@pytest.mark.parametrize("key", KEYS)
def test_a_logged_value_is_that_of_the_whole_batch(key: str, logged: tuple[Memory, Memory]) -> None:
    split, stock = (column(memory, key) for memory in logged)
    assert len(stock) > 1
    assert [step for step, _ in split] == [step for step, _ in stock]
    assert [value for _, value in split] == pytest.approx([value for _, value in stock], rel=1e-12, abs=0)


def test_rows_are_the_same_to_the_order_of_their_keys(logged: tuple[Memory, Memory]) -> None:
    split, stock = logged
    names = {name for _, row in stock.of("") for name in row}
    assert names == set(KEYS)
    assert_same_rows(split, stock)


def test_a_mean_of_equal_values_is_that_value(logged: tuple[Memory, Memory]) -> None:
    split, _ = logged
    assert {value for _, value in column(split, "constant_step")} == {float(torch.tensor(1 / 3))}
    assert {value for _, value in column(split, "large_constant")} == {16_777_215.0}


@pytest.mark.usefixtures("equal_weights")
def test_logged_values_would_show_wrong_weights() -> None:
    """Negative control: the gradient of the second step depends on the weights of the first."""
    split, stock = (fitted(Talkative(), mixed_batches(), *callbacks) for callbacks in ([padmin()], []))
    for key in ("loss_step", "gradient_norm_step"):
        assert [v for _, v in column(split, key)] != pytest.approx([v for _, v in column(stock, key)], rel=1e-3)


def test_without_merging_a_sum_is_that_of_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what Lightning makes of one log call per micro-batch."""
    from lightning_padmin.integrations.lightning import loop as lightning_loop

    class Unmerged(lightning_loop.LogRecorder):
        def replay(self, log: Callable[..., None]) -> None:
            for (fx, name, _), entries in self._calls.items():
                for _, value, arguments in entries:
                    log(fx, name, value, **arguments)

    monkeypatch.setattr(lightning_loop, "LogRecorder", Unmerged)
    split = fitted(Talkative(), ragged_batches(1), padmin())
    assert column(split, "tokens_step") == [(0, 5.0)]
    assert sum(LENGTHS) == 97


@pytest.mark.parametrize("how", ["row-mean", "sum"])
def test_losses_of_other_reductions(how: str) -> None:
    """A summed loss is logged as the sum, though Lightning takes means; also where it came through a float."""

    class Plain(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("as_float", loss.item(), on_step=True, on_epoch=True)
            self.log("twice_the_loss", loss * 2 if how == "row-mean" else loss)
            return loss

    options = {"accumulate_grad_batches": 3}
    split = fitted(Plain(how), mixed_batches(), padmin(loss_reduction=how), **options)
    stock = fitted(Plain(how), mixed_batches(), **options)
    assert_same_rows(split, stock, relative=1e-6)
    for key in ("loss_step", "loss_epoch", "twice_the_loss"):
        assert [v for _, v in column(split, key)] == pytest.approx([v for _, v in column(stock, key)], rel=1e-12)


def test_log_reduce() -> None:
    """Counts that are logged with a mean, as many scripts do, need to be told apart from means."""

    class Counts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            length = batch["attention_mask"].sum(1).double()
            self.log_dict({"rows": float(len(length)), "longest": length.max(), "shortest": length.min()})
            self.log("epoch_rows", float(len(length)), on_step=False, on_epoch=True)
            self.log("width", length.max())
            self.log("token_weighted", length.max())
            self.log("mean_length", length.mean(), batch_size=len(length))
            return super().training_step(batch, batch_idx)

    log_reduce = {"rows": "sum", "longest": "max", "shortest": "min", "epoch_rows": "sum", "width": "last"}
    log_reduce["mean_length"] = "row-mean"
    split = fitted(Counts(), mixed_batches(), padmin(log_reduce=log_reduce))
    stock = fitted(Counts(), mixed_batches())
    for key in ("rows", "longest", "shortest", "epoch_rows"):
        assert column(split, key) == column(stock, key)
        assert len(column(stock, key)) > 0
    assert column(stock, "rows")[0] == (0, 10.0)
    assert [v for _, v in column(split, "mean_length")] == pytest.approx([v for _, v in column(stock, "mean_length")])
    assert column(split, "width")[0] == (0, 3.0)
    # By default a value is a mean over loss tokens, as the loss is: 23, 19, 22, 20 and 3 of 87 of them.
    widths = (23 * 24 + 19 * 20 + 22 * 12 + 20 * 6 + 3 * 3) / 87
    assert column(split, "token_weighted")[0] == (0, pytest.approx(widths, rel=1e-12))


def test_arguments_that_change_between_calls_are_refused_as_in_stock() -> None:
    class Changes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("value", 1.0, on_epoch=False)
            self.log("value", 1.0, on_epoch=True)
            return super().training_step(batch, batch_idx)

    for callbacks in ([], [padmin()]):
        with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
            fit(Changes(), ragged_batches(1), *callbacks)


def test_a_callback_that_logs_in_backward_hooks() -> None:
    class Logs(pl.Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            module.log("batches_before", float(trainer.fit_loop.batch_idx), on_step=True, on_epoch=True)

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            self.norm = support.flat_gradient(module.model).norm()
            module.log("norm", self.norm)

    split, stock = (fitted(Module(), ragged_batches(3), Logs(), *extra) for extra in ([padmin()], []))
    assert_same_rows(split, stock)
    assert [value for _, value in column(split, "batches_before_step")] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("as_number", [True, False])
def test_the_loss_logged_in_on_before_backward(
    accumulate: int, as_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logs(pl.Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            value = loss.item() if as_number else loss
            module.log("sent", value, on_step=True, on_epoch=True)
            module.log("largest", value, on_epoch=True, reduce_fx="max")

    options = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
    split, stock = (fit(Module(), ragged_batches(4), Logs(), *extra, **options) for extra in ([padmin()], []))
    for name in ("sent_step", "sent_epoch", "largest"):
        assert float(split.callback_metrics[name]) == pytest.approx(float(stock.callback_metrics[name]), rel=1e-6)
    monkeypatch.setattr("lightning_padmin.integrations.lightning.log_merge.LossMerge.total", lambda *_: _[2])
    last = fit(Module(), ragged_batches(4), Logs(), padmin(), **options)
    assert float(last.callback_metrics["sent_epoch"]) < 0.5 * float(stock.callback_metrics["sent_epoch"])


def test_what_monitors_see() -> None:
    """callback_metrics, with values that no logger gets."""

    class Hidden(Talkative):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("hidden", loss, logger=False, on_step=True, on_epoch=True)
            self.log("reduced", loss, sync_dist=True, rank_zero_only=True)
            return loss

    seen = []
    for callbacks in ([padmin()], []):
        trainer = fit(Hidden(), mixed_batches(), *callbacks)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen.append({name: value for name, value in metrics.items() if not name.startswith("padmin/")})
    assert {"hidden", "hidden_step", "hidden_epoch", "reduced"} <= set(seen[1])
    assert seen[0] == pytest.approx(seen[1], rel=1e-12, abs=0)


def test_metric_objects_are_those_of_the_epoch() -> None:
    """Their values at a step cannot be merged, and are those of the last micro-batch; those of the epoch are exact."""

    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(support.VOCABULARY, average="micro")
            self.bag = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.CatMetric()])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                guess = self.model(batch["input_ids"])[:, :-1].argmax(-1)
            valid = batch["labels"][:, 1:] != -100
            self.accuracy(guess[valid], batch["labels"][:, 1:][valid])
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.bag.update(batch["attention_mask"].sum(1))
            self.log("longest", self.bag["MaxMetric"], on_step=False, on_epoch=True)
            self.lengths = self.bag["CatMetric"].compute().tolist()
            return super().training_step(batch, batch_idx)

    split, stock = Measured(), Measured()
    rows = fitted(split, mixed_batches(), padmin(), max_epochs=2), fitted(stock, mixed_batches(), max_epochs=2)
    for key in ("accuracy_epoch", "longest"):
        assert dict(column(rows[0], key)) == pytest.approx(dict(column(rows[1], key)), rel=1e-6)
    assert [step for step, _ in column(rows[1], "accuracy_epoch")] == [4, 9]
    assert column(rows[1], "accuracy_epoch")[1][1] > 0.05
    assert dict(column(rows[0], "accuracy_step")) != dict(column(rows[1], "accuracy_step"))
    assert sorted(split.lengths) == sorted(stock.lengths)
    assert len(stock.lengths) == 72


def test_the_progress_bar_is_not_touched() -> None:
    bars = []
    for callbacks in ([padmin()], []):
        trainer = fit(Talkative(), ragged_batches(2), *callbacks, log_every_n_steps=1)
        bars.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})
    assert bars[0] == pytest.approx(bars[1], rel=1e-12)
    assert set(bars[0]) == {"loss", "loss_step", "loss_epoch"} & set(bars[0])


@pytest.mark.parametrize("how", ["LBFGS", "closure called twice"])
def test_closures_that_run_several_times(how: str) -> None:
    """Each run logs, as in stock Lightning."""

    class Twice(Talkative):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if how != "LBFGS":
                optimizer_closure()
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if how == "LBFGS":
                return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
            return super().configure_optimizers()

    split, stock = (fitted(Twice(), mixed_batches(), *extra, max_epochs=2) for extra in ([padmin()], []))
    assert_same_rows(split, stock, relative=1e-9)
    assert column(stock, "tokens_epoch")[0][1] > sum(LENGTHS) * 3 + 2 * 16


# Files


def csv_rows(path: Path) -> list[Row]:
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return sorted(rows, key=lambda row: (row["step"], len(row), sorted(row)))


def test_csv_and_another_logger_get_the_same(tmp_path: Path) -> None:
    memories = {}
    for name, callbacks in (("split", [padmin()]), ("stock", [])):
        memories[name] = Memory()
        loggers = [CSVLogger(tmp_path, name=name, version="0"), memories[name]]
        fit(Talkative(), mixed_batches(), *callbacks, logger=loggers, log_every_n_steps=1)
    files = {name: csv_rows(tmp_path / name / "0" / "metrics.csv") for name in memories}
    for name, memory in memories.items():
        kept = [row | {"step": float(step or 0)} for step, row in memory.rows]
        kept.sort(key=lambda row: (row["step"], len(row), sorted(row)))
        assert len(files[name]) == len(kept)
        for written, remembered in zip(files[name], kept, strict=True):
            assert written == pytest.approx(remembered, rel=1e-12)
    ours = [row for row in files["split"] if "padmin/waste" not in row]
    assert len(ours) == len(files["stock"]) == 6
    for mine, theirs in zip(ours, files["stock"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=0)
    assert [row["step"] for row in files["split"] if "padmin/waste" in row] == [0, 1, 2, 3, 4]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = {}
    for name, callbacks in (("split", [padmin()]), ("stock", [])):
        logger = TensorBoardLogger(tmp_path, name=name, version=0)
        fit(Module(), mixed_batches(), *callbacks, logger=logger, log_every_n_steps=1)
        events = EventAccumulator(str(tmp_path / name / "version_0"))
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag != "hp_metric"]
        scalars[name] = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    assert [step for step, _ in scalars["split"]["padmin/slots"]] == [0, 1, 2, 3, 4]
    assert [value for _, value in scalars["split"]["padmin/slots"]] == [98, 16, 98, 16, 98]
    for tag, values in scalars["stock"].items():
        assert [step for step, _ in scalars["split"][tag]] == [step for step, _ in values]
        assert [v for _, v in scalars["split"][tag]] == pytest.approx([v for _, v in values], rel=1e-6)
    assert {tag for tag in scalars["split"] if not tag.startswith("padmin/")} == set(scalars["stock"])


# The loss under any reduction over the epoch

HOW: dict[str, Any] = {"mean": "mean", "max": "max", "min": min, "sum": torch.sum}


class LogsLoss(Module):
    """Logs the loss in every form that scripts have, under every reduction; and figures that are not the loss."""

    def __init__(self, how: str, accumulate: int = 1) -> None:
        super().__init__(how)
        self.accumulate, self.seen = accumulate, list[dict[str, Any]]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, rows = self.loss(batch), self.row_losses(batch)
        forms = {"plain": loss, "number": loss.item(), "half": loss.bfloat16(), "part": loss / self.accumulate}
        for name, form in forms.items():
            for how, reduce_fx in HOW.items():
                self.log(f"{name}_{how}", form, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
        self.log("sized", loss, on_epoch=True, on_step=False, reduce_fx="max", batch_size=len(rows))
        self.log("hardest", rows.max(), on_epoch=True, on_step=False, reduce_fx="max")
        self.log("easiest", rows.min(), on_epoch=True, on_step=False, reduce_fx="min")
        self.log("total", rows.sum(), on_epoch=True, on_step=False, reduce_fx="sum")
        return {"loss": loss, "nll": loss.detach(), "number": loss.item(), "boxed": loss.detach()[None]}

    def row_losses(self, batch: dict[str, Tensor]) -> Tensor:
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"]).detach().sum(1)
        valid = (batch["labels"][:, 1:] != -100).sum(1)
        return losses if self.how == "sum" else losses / valid.clamp(min=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append({name: value for name, value in outputs.items() if name in ("nll", "number")})


def assert_same_epoch(
    how: str, batches: list[Any], accumulate: int = 1, make: type[LogsLoss] = LogsLoss, **options: Any
) -> None:
    """Logged values at steps and epochs, what monitors see, and what hooks get."""
    split, stock = make(how, accumulate), make(how, accumulate)
    fit_options = {"accumulate_grad_batches": accumulate}
    ours = fitted(split, batches, padmin(loss_reduction=how, **options), **fit_options)
    theirs = fitted(stock, batches, **fit_options)
    assert [step for step, _ in ours.of("")] == [step for step, _ in theirs.of("")]
    for (_, mine), (_, other) in zip(ours.of(""), theirs.of(""), strict=True):
        assert list(mine) == list(other)
        for name, value in other.items():
            bound = 2e-2 if name.startswith("half") else 1e-6 if name.startswith("number") else 1e-12
            assert mine[name] == pytest.approx(value, rel=bound, abs=0, nan_ok=True), name
    for mine, other in zip(split.seen, stock.seen, strict=True):
        for name in ("nll", "number"):
            assert float(mine[name]) == pytest.approx(float(other[name]), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_loss_under_every_reduction(how: str, accumulate: int) -> None:
    assert_same_epoch(how, mixed_batches(), accumulate)


@pytest.mark.parametrize("how", ["token-mean", "sum"])
def test_the_loss_where_every_micro_batch_is_one_row(how: str) -> None:
    """There the largest loss of a row equals the loss; the check's passes of several rows tell them apart."""
    assert_same_epoch(how, ragged_batches(3), max_rows=1)


class Penalised(LogsLoss):
    """Its loss has something left where no token carries loss."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"])
        tokens = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        return losses.sum() / tokens + 0.1 * self.model.head.weight.square().mean()


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
@pytest.mark.parametrize("make", [LogsLoss, Penalised])
def test_the_loss_of_a_batch_without_loss_tokens(make: type[LogsLoss]) -> None:
    nothing = ragged_batches(1, lengths=(24, 12, 6, 6), without_loss=range(4))
    how = "sum" if make is LogsLoss else "token-mean"
    assert_same_epoch(how, [*ragged_batches(2), *nothing], make=make)


def test_a_loss_that_some_micro_batches_log() -> None:
    class Sometimes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if (batch["attention_mask"].sum(1) > 10).any():
                self.log("worst", loss, on_step=True, on_epoch=True, reduce_fx="max")
            return loss

    ours, stock = (fitted(Sometimes(), ragged_batches(3), *extra) for extra in ([padmin()], []))
    assert_same_rows(ours, stock)


def test_an_entry_of_log_reduce_wins_over_the_loss() -> None:
    largest = fitted(LogsLoss("token-mean"), ragged_batches(1), padmin(log_reduce={"plain_max": "max"}))
    merged = fitted(LogsLoss("token-mean"), ragged_batches(1), padmin())
    assert column(largest, "plain_max_step")[0][1] > column(merged, "plain_max_step")[0][1] + 1e-3
    assert column(merged, "plain_max_step")[0][1] == pytest.approx(column(merged, "plain_mean_step")[0][1])


def test_where_nothing_tells_the_loss_from_the_largest_row_it_is_said() -> None:
    class Alone(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
            return loss

    with pytest.warns(PadMinWarning, match=r"'worst' .* log_reduce=\{'worst': 'max'\}") as told:
        ours = fitted(Alone(), ragged_batches(3), padmin(check="off", max_rows=1))
    assert sum(issubclass(each.category, PadMinWarning) for each in told) == 1
    assert_same_rows(ours, fitted(Alone(), ragged_batches(3)))


def test_without_knowing_the_loss_its_maximum_is_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from lightning_padmin.integrations.lightning import log_merge as lightning_merge

    monkeypatch.setattr(lightning_merge.LossMerge, "equals", lambda *_: False)
    with pytest.raises(AssertionError):
        assert_same_epoch("token-mean", mixed_batches())
