"""Lightning's Trainer, stock and with PadMinCallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_padmin import PadMinCallback

from .ledger import Ledger
from .runs import DEVICE, Batch, Setting, Sizes, Watch, only_largest


class Causal(pl.LightningModule):
    """A model of transformers, whose loss is logged at every step."""

    def __init__(self, model: torch.nn.Module, watch: Watch) -> None:
        super().__init__()
        self.model, self.watch = model, watch

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The mean loss over the tokens of `labels`."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See `Watch`."""
        return self.watch.optimizer(self.model)


class LightningRun:
    """Each turn is a fit of its own; one batch is a step."""

    def __init__(self, setting: Setting, ledger: Ledger, is_ours: bool) -> None:
        self.ledger, self.watch = ledger, Watch(ledger)
        self.model = setting.model()
        self.module = Causal(self.model, self.watch)
        self.batches: Sequence[Batch] = setting.batches(of_step=1)
        self.callback = PadMinCallback(config=setting.config()) if is_ours else None

    def turn(self) -> None:
        """Fits; a step is from the fetch of a batch to the end of Lightning's hooks behind it."""
        trainer = pl.Trainer(
            accelerator="gpu" if DEVICE == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            log_every_n_steps=1,
            callbacks=[self.callback] if self.callback is not None else [],
            logger=DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loop: Any = trainer.fit_loop.epoch_loop
        advance, behind = loop.advance, loop.on_advance_end

        def timed_advance(*args: Any) -> None:
            self.ledger.begin()
            advance(*args)

        def timed_end(*args: Any) -> None:
            behind(*args)
            self.ledger.end()

        loop.advance, loop.on_advance_end = timed_advance, timed_end
        self.module.train()
        trainer.fit(self.module, DataLoader(self.batches, batch_size=None, shuffle=False))

    def sizes(self) -> Sizes:
        """Of a step."""
        if self.callback is None:
            return Sizes.of(self.batches, len(self.batches))
        return Sizes.counted(self.callback.stats, self.watch.steps)

    def largest(self, stock: Any) -> tuple[list[int], Any]:
        """See `Run`."""
        assert self.callback is not None
        return only_largest(self.batches, self.callback.config, stock)
