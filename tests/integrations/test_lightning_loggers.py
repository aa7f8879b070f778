"""Three loggers at once (CSV, TensorBoard, Weights & Biases offline), and progress bars."""

from __future__ import annotations

import csv
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import support
import torch
import torchmetrics
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from support import Memory, Module, fit, fitted, mixed_batches, padmin, ragged_batches
from torch import Tensor

Series = dict[str, list[tuple[int, float]]]  # name -> (step, value), in the order of writing
LOGGERS = ("csv", "tensorboard", "wandb")
LOG_REDUCE = {"rows": "sum", "longest_row": "max", "mean_length": "row-mean"}
WANDB_BLOCK, WANDB_HEADER = 32_768, 7


class Mixed(Module):
    """Logs in the ways whose parts the callback can put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = torchmetrics.MetricCollection(
            {
                "micro": torchmetrics.classification.MulticlassAccuracy(support.VOCABULARY, average="micro"),
                "seen": torchmetrics.SumMetric(),
            }
        )
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss, valid = self.loss(batch), batch["labels"][:, 1:] != -100
        length = batch["attention_mask"].sum(1).double()
        rows, both = len(length), {"on_step": True, "on_epoch": True}
        self.log("loss", loss, sync_dist=True, **both)
        self.log("loss_of_rows", loss, batch_size=rows, sync_dist=True, **both)
        self.log("loss_of_tokens", loss, batch_size=int(valid.sum()), **both)
        self.log("tokens", length.sum(), reduce_fx="sum", sync_dist=True, **both)
        self.log("longest", length.max(), reduce_fx=torch.max, batch_size=rows, **both)
        self.log("shortest", length.min(), reduce_fx="min", sync_dist=True, **both)
        self.log("rows", float(rows), **both)
        self.log("longest_row", length.max(), **both)
        self.log("mean_length", length.mean(), batch_size=rows, **both)
        self._measure(batch, loss, valid)
        return {"loss": loss, "length": length, "share_even": (batch["labels"][:, 1:][valid] % 2 == 0).double().mean()}

    def _measure(self, batch: dict[str, Tensor], loss: Tensor, valid: Tensor) -> None:
        with torch.no_grad():
            guess = self.model(batch["input_ids"])[:, :-1].argmax(-1)
        targets = batch["labels"][:, 1:]
        self.correct["micro"].update(guess[valid], targets[valid])
        self.correct["seen"].update(valid.sum())
        self.log_dict(dict(self.correct.items()), on_step=False, on_epoch=True)
        self.mean_loss.update(loss.detach(), valid.sum())
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What training_step returned, merged, in the order of the batch's rows."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        both = {"on_step": True, "on_epoch": True}
        self.log("first_row", outputs["length"][0], batch_size=len(outputs["length"]), **both)
        self.log("returned_share", outputs["share_even"], **both)


# Reading what was written


def from_csv(folder: Path) -> Series:
    with (folder / "csv" / "0" / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return series([(int(row.pop("step")), row) for row in rows])


def from_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "0"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def from_wandb(folder: Path) -> Series:
    rows = []
    for items in wandb_history(folder):
        row = {name: value for name, value in items.items() if not name.startswith("_")}
        rows.append((int(row.pop("trainer/global_step")), row))
    return series(rows)


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """Rows of an offline run, whose file is complete some time after `finish` only."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
            return [{"/".join(i.nested_key) or i.key: float(i.value_json) for i in row.item} for row in history]
        time.sleep(0.2)
    raise TimeoutError(f"{file} has not been completed")


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The file is a log of blocks: checksum, length and kind (1 whole, 2 3 4 first, middle, last) before each part."""
    at, whole = WANDB_HEADER, b""
    while at + WANDB_HEADER <= len(data):
        left = WANDB_BLOCK - at % WANDB_BLOCK
        if left < WANDB_HEADER:  # too short for another part
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + WANDB_HEADER : at + WANDB_HEADER + length]
        at += WANDB_HEADER + length
        if kind in (1, 4):
            yield whole
            whole = b""


def series(rows: list[tuple[int, dict[str, float]]]) -> Series:
    names = dict.fromkeys(name for _, row in rows for name in row)
    return {name: [(step, row[name]) for step, row in rows if name in row] for name in names}


# One run with all loggers


@dataclass
class Written:
    folder: Path
    has_wandb: bool

    def by(self, logger: str) -> Series:
        if logger == "wandb" and not self.has_wandb:
            pytest.skip("wandb is not installed")
        return {"csv": from_csv, "tensorboard": from_tensorboard, "wandb": from_wandb}[logger](self.folder)


def write(folder: Path, *callbacks: pl.Callback) -> Written:
    """Two epochs of five batches, written at every third step."""
    loggers: list[Logger] = [
        CSVLogger(folder, name="csv", version="0"),
        TensorBoardLogger(folder, name="tensorboard", version="0"),
    ]
    wandb = wandb_logger(folder)
    if wandb is not None:
        loggers.append(wandb)
    fit(Mixed(), mixed_batches(), *callbacks, logger=loggers, log_every_n_steps=3, max_epochs=2)
    if wandb is not None:
        wandb.experiment.finish()
    return Written(folder, wandb is not None)


def wandb_logger(folder: Path) -> Any:
    try:
        import wandb  # noqa: F401
    except ImportError:
        return None
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(save_dir=folder, offline=True, project="padmin")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Written, Written]]:
    """With the callback and without."""
    pytest.importorskip("tensorboard")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MODE": "offline", "SILENT": "true", "ANONYMOUS": "never"}.items():
            patch.setenv(f"WANDB_{name}", value)
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(home))
        split = write(tmp_path_factory.mktemp("split"), padmin(log_reduce=LOG_REDUCE))
        yield split, write(tmp_path_factory.mktemp("stock"))


# Counted by hand: ten rows of LENGTHS, 24 wide, and three rows of 8, 4 and 4 tokens, 10 wide.
LARGE = {"real_tokens": 97, "loss_tokens": 87, "before": 240, "slots": 98, "micro_batches": 5}
SMALL = {"real_tokens": 16, "loss_tokens": 13, "before": 30, "slots": 16, "micro_batches": 2}
# Batches are large, small, large, small, large in each epoch: (step, how many of each since the last time).
WINDOWS = [(2, 2, 1), (5, 2, 1), (8, 1, 2), (9, 1, 0)]


def counted() -> Series:
    rows = []
    for step, large, small in WINDOWS:
        total = {name: large * LARGE[name] + small * SMALL[name] for name in LARGE}
        before = total.pop("before")
        real, slots = total["real_tokens"], total["slots"]
        ratios = {"waste": 1 - real / slots, "waste_before": 1 - real / before, "idle": 0.0}
        rest = {"longest_row": 24.0, "dummies": 0.0, "over_budget_rows": 0.0}
        rows.append((step, {f"padmin/{name}": float(value) for name, value in (total | ratios | rest).items()}))
    return series(rows)


def precision(logger: str) -> float:
    return 1e-6 if logger == "tensorboard" else 1e-12  # TensorBoard keeps float32


def assert_same(ours: Series, theirs: Series, relative: float) -> None:
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert [step for step, _ in ours[name]] == [step for step, _ in values], name
        bound = max(relative, 1e-6) if name == "mean_loss" else relative  # torchmetrics takes its values as float32
        expected = pytest.approx([value for _, value in values], rel=bound, abs=bound * 1e-3)
        assert [value for _, value in ours[name]] == expected, name


def of_padmin(everything: Series, ours: bool = True) -> Series:
    """Of the callback, or of others; audits are another matter."""
    everything = {
        name: values for name, values in everything.items() if not name.startswith(("padmin/audit", "padmin/mode"))
    }
    return {name: values for name, values in everything.items() if name.startswith("padmin/") == ours}


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_gets_the_counts_at_the_same_steps(logger: str, written: tuple[Written, Written]) -> None:
    split, stock = (each.by(logger) for each in written)
    assert_same(of_padmin(split), counted(), precision(logger))
    assert of_padmin(stock) == {}


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_gets_what_it_gets_un_split(logger: str, written: tuple[Written, Written]) -> None:
    split, stock = (of_padmin(each.by(logger), ours=False) for each in written)
    # Eleven values at steps and at epochs, three metric objects at epochs, and the number of the epoch.
    assert len(stock) >= 2 * 11 + 3 + 1
    assert_same(split, stock, precision(logger))


def test_all_loggers_agree(written: tuple[Written, Written]) -> None:
    split, _ = written
    reference = split.by("csv")
    for logger in LOGGERS[1:] if split.has_wandb else ("tensorboard",):
        assert_same(split.by(logger), reference, precision(logger))


def test_the_values_are_those_of_whole_batches(written: tuple[Written, Written]) -> None:
    """Against the batches themselves, so that both runs cannot be wrong together."""
    found = written[0].by("csv")
    assert [value for _, value in found["rows_step"]] == [10, 10, 3]
    assert [value for _, value in found["tokens_step"]] == [97, 97, 16]
    assert [value for _, value in found["tokens_epoch"]] == [3 * 97 + 2 * 16] * 2
    assert [value for _, value in found["shortest_epoch"]] == [2, 2]
    assert [value for _, value in found["longest_row_step"]] == [24, 24, 8]
    assert [value for _, value in found["seen"]] == [3 * 87 + 2 * 13] * 2
    first = [int(batch["attention_mask"][0].sum()) for batch in mixed_batches()]
    assert [value for _, value in found["first_row_step"]] == [first[2], first[0], first[3]]


def test_without_log_reduce_a_count_is_a_mean() -> None:
    """Negative control: the comparison above would show it."""
    split, stock = (series(fitted(Mixed(), mixed_batches(), *extra).of("")) for extra in ([padmin()], []))
    for name in ("rows_step", "rows_epoch", "longest_row_step", "mean_length_step"):
        with pytest.raises(AssertionError):
            assert_same({name: split[name]}, {name: stock[name]}, 1e-3)
    assert_same({"loss": split["loss_step"]}, {"loss": stock["loss_step"]}, 1e-12)


# Progress bars

WASTE = "padmin/waste"


class ShowsWaste(pl.Callback):
    """What puts it into a progress bar: a callback after PadMinCallback that logs it again."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if WASTE in trainer.callback_metrics:
            module.log("waste", trainer.callback_metrics[WASTE], prog_bar=True, logger=False)


class TqdmWithWaste(TQDMProgressBar):
    """The other way: a bar that asks for it."""

    def get_metrics(self, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        return with_waste(super().get_metrics(trainer, module), trainer)


class RichWithWaste(RichProgressBar):
    def get_metrics(self, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        return with_waste(super().get_metrics(trainer, module), trainer)


def with_waste(items: dict[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    return items | {"waste": f"{float(trainer.callback_metrics.get(WASTE, 0)):.3f}"}


def drawn(capsys: pytest.CaptureFixture[str], bar: pl.Callback, *callbacks: pl.Callback) -> str:
    capsys.readouterr()
    options = {"enable_progress_bar": True, "log_every_n_steps": 1}
    fit(Module(), ragged_batches(2), padmin(), *callbacks, bar, **options)
    captured = capsys.readouterr()
    return captured.out + captured.err


def rich_bar(kind: type[RichProgressBar]) -> RichProgressBar:
    return kind(console_kwargs={"force_terminal": True, "width": 200})


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_how_a_progress_bar_shows_the_waste(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "rich" and lightning.__version__.startswith("2.5."):
        pytest.skip("this Lightning's RichProgressBar does not start with a newer rich")
    plain, asks = (TQDMProgressBar, TqdmWithWaste) if kind == "tqdm" else (RichProgressBar, RichWithWaste)
    make = (lambda bar: bar()) if kind == "tqdm" else rich_bar
    assert "waste" not in drawn(capsys, make(plain))
    for text in (drawn(capsys, make(plain), ShowsWaste()), drawn(capsys, make(asks))):
        assert "0.010" in text.rpartition("waste")[2], "1 - 97 / 98"


def test_a_callback_that_shows_it_changes_no_rows() -> None:
    with_it, without = (
        fitted(Module(), mixed_batches(), padmin(), *extra, log_every_n_steps=2).rows for extra in ([ShowsWaste()], [])
    )
    assert with_it == without


def test_what_is_shown_is_of_the_batch_that_has_just_ended() -> None:
    seen: list[float] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, *arguments)
            seen.append(float(trainer.progress_bar_metrics["waste"]))

    options = {"enable_progress_bar": True, "log_every_n_steps": 1, "logger": Memory()}
    fit(Module(), mixed_batches(), padmin(), ShowsWaste(), Bar(), **options)
    assert seen == pytest.approx([1 / 98, 0, 1 / 98, 0, 1 / 98])
