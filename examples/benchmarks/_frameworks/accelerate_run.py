"""A plain loop with Accelerate, which accumulates batches, stock and with PadMin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from lightning_padmin.integrations.accelerate import PadMin

from .ledger import Ledger
from .runs import DEVICE, Batch, Setting, Sizes, Watch, only_largest


class AccelerateRun:
    """Each turn goes through the batches once."""

    def __init__(self, setting: Setting, ledger: Ledger, is_ours: bool) -> None:
        self.ledger, self.watch = ledger, Watch(ledger)
        self.accelerator = Accelerator(gradient_accumulation_steps=setting.accumulate, cpu=DEVICE == "cpu")
        model = setting.model()
        self.model, self.optimizer = self.accelerator.prepare(model, self.watch.optimizer(model))
        self.batches: Sequence[Batch] = setting.batches(of_step=setting.accumulate)
        self.pad = PadMin(self.accelerator, setting.config()) if is_ours else None

    def turn(self) -> None:
        """A step is from the fetch of its first batch to the metrics behind it."""
        accelerator, model, optimizer, pad = self.accelerator, self.model, self.optimizer, self.pad
        loader: Any = accelerator.prepare(DataLoader(self.batches, batch_size=None, shuffle=False))
        self.ledger.begin()
        for batch in loader:
            with accelerator.accumulate(model):
                if pad is None:
                    accelerator.backward(model(**batch, use_cache=False).loss)
                else:
                    for micro, weight in pad.micro_batches(batch, model):
                        accelerator.backward(model(**micro, use_cache=False).loss * weight)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if pad is not None:
                    accelerator.log(pad.metrics())
                self.ledger.end()
                self.ledger.begin()
        self.ledger.drop()

    def sizes(self) -> Sizes:
        """Of a step."""
        if self.pad is None:
            return Sizes.of(self.batches, len(self.batches) // self.accelerator.gradient_accumulation_steps)
        return Sizes.counted(self.pad.stats, self.watch.steps)

    def largest(self, stock: Any) -> tuple[list[int], Any]:
        """See `Run`."""
        assert self.pad is not None
        return only_largest(self.batches, self.pad.config, stock)
